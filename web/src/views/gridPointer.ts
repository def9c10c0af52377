/** Pointer and arrow keys on a grid, shared by all maps and images. */

export type How = "hover" | "press" | "touch";

type Pointed = PointerEvent & { currentTarget: HTMLElement };

/** Return the (row, column) under the pointer on a grid that fills an element, clamped to the grid. */
function placeIn(event: Pointed, sizes: readonly [number, number]): [number, number] {
  const box = event.currentTarget.getBoundingClientRect();
  const along = (at: number, extent: number, size: number): number =>
    Math.min(size - 1, Math.max(0, Math.floor((at / extent) * size)));
  return [along(event.clientY - box.top, box.height, sizes[0]), along(event.clientX - box.left, box.width, sizes[1])];
}

/** Return the event handlers of an element that shows a grid. On a touch screen, a tap moves the query and locks it. */
export function pointing(
  sizes: readonly [number, number],
  report: (place: [number, number], how: How) => void,
): { onpointermove: (event: Pointed) => void; onclick: (event: MouseEvent) => void } {
  return {
    onpointermove: (event) => {
      if (event.pointerType !== "touch") report(placeIn(event, sizes), "hover");
    },
    onclick: (event) => {
      const pointed = event as Pointed; // Enter on a button causes a click without a pointer
      if (pointed.pointerType) report(placeIn(pointed, sizes), pointed.pointerType === "touch" ? "touch" : "press");
    },
  };
}

const ARROWS: Readonly<Record<string, readonly [number, number]>> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

/** Return the step (rows, columns) of an arrow key, 5 with Shift; null for other keys. */
export function stepOf(event: KeyboardEvent): readonly [number, number] | null {
  const arrow = ARROWS[event.key];
  const far = event.shiftKey ? 5 : 1;
  return arrow && !event.altKey && !event.ctrlKey && !event.metaKey ? [far * arrow[0], far * arrow[1]] : null;
}
