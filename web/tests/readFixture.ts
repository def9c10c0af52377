import { readFileSync } from "node:fs";

/** Read a fixture that the Python library wrote. */
export function fixture(name: string): ArrayBuffer {
  const bytes = readFileSync(new URL(`fixtures/${name}`, import.meta.url));
  return bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength) as ArrayBuffer;
}

/** Return the largest difference of two lists of numbers; infinite if their lengths differ. */
export function apart(left: ArrayLike<number>, right: ArrayLike<number>): number {
  if (left.length !== right.length) return Infinity;
  return Array.from(left).reduce((most, value, index) => Math.max(most, Math.abs(value - right[index]!)), 0);
}
