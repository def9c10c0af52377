/**
 * One colour per head: evenly spaced hues of equal lightness and chroma in OKLCH, readable on light and dark backgrounds.
 *
 *     hue(head) = 360 degrees * (head * step mod heads) / heads
 *
 * `step` has no common divisor with the number of heads, so that every hue occurs once, and is close to 0.38 of it, so
 * that neighbouring heads have very different hues.
 */
const LIGHTNESS = 0.645;
const CHROMA = 0.17; // reduced for hues that sRGB cannot show
const FIRST = 30; // degrees, an orange red
const GOLDEN = 0.381966;

const known = new Map<string, string>();

/** Return the colour of a head among the heads of its layer, as #rrggbb. */
export function headColour(head: number, heads: number): string {
  const key = `${head}/${heads}`;
  const found = known.get(key);
  if (found !== undefined) return found;
  const colour = hex(FIRST + (360 * ((head * stepFor(heads)) % heads)) / heads);
  known.set(key, colour);
  return colour;
}

/** Return the number without a common divisor with `heads` that is closest to the golden section of it. */
function stepFor(heads: number): number {
  const wanted = GOLDEN * heads;
  let best = 1;
  for (let step = 1; step < heads; step++) {
    if (divisor(step, heads) === 1 && Math.abs(step - wanted) < Math.abs(best - wanted)) best = step;
  }
  return best;
}

const divisor = (one: number, other: number): number => (other === 0 ? one : divisor(other, one % other));

/** Return the sRGB colour of a hue, with as much of the chroma as sRGB can show. */
function hex(hue: number): string {
  let chroma = CHROMA;
  while (linear(hue, chroma).some((value) => value < 0 || value > 1)) chroma -= 0.002;
  const bytes = linear(hue, chroma).map((value) => Math.round(255 * (value <= 0.0031308 ? 12.92 * value : 1.055 * value ** (1 / 2.4) - 0.055)));
  return `#${bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** Convert OKLCH with the lightness above to linear sRGB (Ottosson, 2020). */
function linear(hue: number, chroma: number): number[] {
  const [a, b] = [chroma * Math.cos((hue * Math.PI) / 180), chroma * Math.sin((hue * Math.PI) / 180)];
  const l = (LIGHTNESS + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (LIGHTNESS - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (LIGHTNESS - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}
