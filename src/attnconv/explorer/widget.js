/**
 * The notebook's end of the channel to the page: messages from the iframe are stored in `told`, and `asked` is sent to it.
 *
 * Iframes are found by their mark. This includes the iframes in ordinary HTML output, which is saved with the notebook
 * and needs no view of this widget. web/src/state/channel.ts is the page's end and defines the messages.
 */
const TELLS = "attnconv-selection";
const ASKS = "attnconv-select";

/** Iframes created by `render`, by mark: document queries do not reach into a shadow root. */
const rendered = new Map();

const framesOf = (mark) => [
  ...document.querySelectorAll(`iframe[data-attnconv="${CSS.escape(mark)}"]`),
  ...(rendered.get(mark) ?? []),
];

const isCount = (value) => Number.isSafeInteger(value) && value >= 0;

/** A validated copy of a selection message, null for no selection, or undefined for any other message. */
function toldIn(data) {
  if (typeof data !== "object" || data === null || data.type !== TELLS) return undefined;
  if (data.selection === null) return null;
  if (typeof data.selection !== "object") return undefined;
  const { layer, head, query, image, time, part } = data.selection;
  const fits =
    [layer, head, time, query?.[0], query?.[1]].every(isCount) &&
    (image === null || isCount(image)) &&
    typeof part === "string" &&
    part.length < 20;
  return fits ? { layer, head, query: [query[0], query[1]], image, time, part } : undefined;
}

function initialize({ model }) {
  const mark = model.get("mark");
  const open = new WeakSet(); // windows in which the page has loaded its payload
  // A sandboxed iframe has no origin and can only be addressed with "*"; the message contains nothing but indices.
  const ask = (target, entries) => target.postMessage({ ...entries, type: ASKS }, "*");
  const asked = () => model.get("asked")[1];

  function heard({ source, origin, data }) {
    if (source === null || origin !== "null" || !framesOf(mark).some((frame) => frame.contentWindow === source)) return;
    const told = toldIn(data);
    if (told === undefined) return;
    model.set("told", told);
    model.save_changes();
    if (told === null || open.has(source)) return;
    open.add(source);
    if (Object.keys(asked()).length > 0) ask(source, asked());
  }

  function changed() {
    for (const { contentWindow } of framesOf(mark)) if (contentWindow && open.has(contentWindow)) ask(contentWindow, asked());
  }

  addEventListener("message", heard);
  model.on("change:asked", changed);
  // Request the selection of pages that loaded before this channel.
  for (const { contentWindow } of framesOf(mark)) if (contentWindow) ask(contentWindow, {});
  return () => {
    removeEventListener("message", heard);
    model.off("change:asked", changed);
  };
}

/** Show the page in a new iframe, for front ends that show only widgets and no HTML. */
function render({ model, el }) {
  const mark = model.get("mark");
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", model.get("sandbox"));
  frame.dataset.attnconv = mark;
  frame.title = model.get("title");
  frame.style.cssText = `width: 100%; height: ${model.get("height")}px; border: 0`;
  frame.srcdoc = model.get("page");
  if (!rendered.has(mark)) rendered.set(mark, new Set());
  rendered.get(mark).add(frame);
  el.append(frame);
  return () => {
    rendered.get(mark).delete(frame);
    frame.remove();
  };
}

export default { initialize, render };
