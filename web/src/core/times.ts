/** Names of times of training: a snapshot, or a time between two. */

/** Return the name of a time, such as "epoch 3", "epoch 3.4" or "current weights". */
export function timeName(times: readonly string[], time: number): string {
  const [before, after] = [Math.floor(time), Math.ceil(time)].map((at) => times[at] ?? "");
  if (before === after) return before === "now" ? "current weights" : before!;
  const [first, last] = [before!, after!].map((name) => /^epoch (\d+)$/.exec(name)?.[1]);
  if (first === undefined || last === undefined) return before!;
  return `epoch ${(Number(first) + (time % 1) * (Number(last) - Number(first))).toFixed(1)}`;
}
