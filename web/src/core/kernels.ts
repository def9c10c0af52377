/** Named kernels of size 3 x 3 and 5 x 5, row-major. */
export const KERNELS = ["identity", "box", "gaussian", "edge", "sharpen", "emboss"] as const;
export type KernelName = (typeof KERNELS)[number];

export const KERNEL_TITLES: Readonly<Record<KernelName | "free", string>> = {
  identity: "Identity",
  box: "Box blur",
  gaussian: "Gaussian blur",
  edge: "Edge detection",
  sharpen: "Sharpen",
  emboss: "Emboss",
  free: "Custom",
};

const BINOMIAL: Readonly<Record<number, readonly number[]>> = { 3: [1, 2, 1], 5: [1, 4, 6, 4, 1] };
const LAPLACE: Readonly<Record<number, readonly number[]>> = {
  3: [0, 1, 0, 1, -4, 1, 0, 1, 0],
  5: [0, 0, 1, 0, 0, 0, 1, 2, 1, 0, 1, 2, -16, 2, 1, 0, 1, 2, 1, 0, 0, 0, 1, 0, 0].map((weight) => weight / 4),
};

export function kernelNamed(name: KernelName, width: number): number[] {
  const middle = (width - 1) / 2;
  const taps = (weight: (row: number, column: number) => number): number[] =>
    Array.from({ length: width * width }, (_, tap) => weight(Math.floor(tap / width), tap % width));
  const identity = taps((row, column) => (row === middle && column === middle ? 1 : 0));
  switch (name) {
    case "identity":
      return identity;
    case "box":
      return taps(() => 1 / width ** 2);
    case "gaussian":
      return taps((row, column) => (BINOMIAL[width]![row]! * BINOMIAL[width]![column]!) / 4 ** (width - 1));
    case "edge":
      return [...LAPLACE[width]!];
    case "sharpen":
      return identity.map((weight, tap) => weight - LAPLACE[width]![tap]!);
    case "emboss":
      return taps((row, column) => (row + column - 2 * middle) / middle + identity[row * width + column]!);
  }
}
