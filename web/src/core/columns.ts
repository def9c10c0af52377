/** What the columns of the audit's statistics are called on the page, and what they say: one line each, with the unit. */
export interface Column {
  readonly title: string;
  readonly words: string;
}

const COLUMNS: Readonly<Record<string, Column>> = {
  layer: { title: "layer", words: "Module of the model, in the order in which they run." },
  head: { title: "head", words: "Number of the head in its layer, counted from 0." },
  "best row": { title: "best row", words: "Rows from the query to where the head looks most in the mean, in tokens, down is positive." },
  "best column": { title: "best column", words: "Columns from the query to where the head looks most in the mean, in tokens, right is positive." },
  mass: { title: "mass there", words: "Mean probability at this best shift: 1 for a head that is one tap of a convolution." },
  constancy: { title: "constancy", words: "How far the pattern stays the same as the query moves: 1 for every convolution, soft ones too." },
  entropy: { title: "entropy", words: "How spread out a row of probabilities is, in nats: 0 for one token, log n for n equal ones." },
  distance: { title: "distance", words: "Mean distance from the query to where it looks, in tokens." },
  "mass elsewhere": { title: "elsewhere", words: "Mean probability on what is no token of the image: class tokens, registers, padding." },
  "content share": { title: "content", words: "Part of the variance of the probabilities that differs between images: 0 if positions decide alone." },
  "gaussian overlap": { title: "Gaussian", words: "Mass shared with the Gaussian of the same mean and covariance: 1 if the pattern is one." },
  score: { title: "score", words: "Convolution score, the share of attention that one tap per head accounts for: 1 for a convolution, 0 for chance." },
  coverage: { title: "coverage", words: "Mean mass of distinct heads on the taps of the kernel, in the middle of the field, that they could make up." },
  "tap residual": { title: "tap residual", words: "How far the taps of that kernel lie outside the span of the heads' mean maps: 0 if weights can make it." },
  redundancy: { title: "redundancy", words: "Mean cosine between the profiles of two heads: 1 if all do the same." },
  "receptive field": { title: "field", words: "Receptive field: root mean square extent of the heads' mean profile, in tokens." },
  "3 x 3 missed": { title: "3 × 3 missed", words: "Relative part of 3 × 3 kernels that no value weights of the layer reach: 0 if it can be each of them." },
  "rounding of scores": { title: "rounding", words: "How far stored scores may be from the exact ones, in nats: half the range within a row." },
};

/** A column's title and words; a statistic that the page does not know goes by its own name. */
export const columnNamed = (name: string): Column =>
  Object.hasOwn(COLUMNS, name) ? COLUMNS[name]! : { title: name, words: "" };
