/** Radius around the query in the figures of a single head, in pixels. */
export const BELL_RADIUS = 5;
export const BELL_WIDTH = 2 * BELL_RADIUS + 1;
