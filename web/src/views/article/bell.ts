/** How far the figures of one head look around the query, in pixels. */
export const BELL_RADIUS = 5;
export const BELL_WIDTH = 2 * BELL_RADIUS + 1;
