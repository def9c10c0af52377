/** Titles and one-line descriptions, with units, of the columns of the statistics tables. */
export interface Column {
  readonly title: string;
  readonly words: string;
}

const COLUMNS: Readonly<Record<string, Column>> = {
  layer: { title: "layer", words: "Module name, in order of execution." },
  head: { title: "head", words: "Index of the head in its layer, from 0." },
  "best row": { title: "best row", words: "Row of the shift with the highest mean probability, in tokens; positive is down." },
  "best column": { title: "best column", words: "Column of the shift with the highest mean probability, in tokens; positive is right." },
  mass: { title: "best mass", words: "Mean probability at the best shift: 1 if the head is one tap of a convolution." },
  constancy: { title: "constancy", words: "How constant the pattern is as the query moves: 1 for every convolution, including soft ones." },
  entropy: { title: "entropy", words: "Mean entropy of a query's probabilities, in nats: 0 for a single token, log n for n equal tokens." },
  distance: { title: "distance", words: "Mean distance from the query to the attended tokens, in tokens." },
  "mass elsewhere": { title: "elsewhere", words: "Mean probability outside the image's tokens: on class tokens, registers or padding." },
  "content share": { title: "content", words: "Fraction of the variance of the probabilities that differs between images: 0 if only positions matter." },
  "gaussian overlap": { title: "Gaussian", words: "Overlap with the Gaussian of the same mean and covariance: 1 if the pattern is Gaussian." },
  score: { title: "score", words: "Convolution score: the share of attention that one tap per head explains, 1 for a convolution and 0 for chance." },
  coverage: { title: "coverage", words: "Mean probability at the taps of the largest kernel that the heads can form, one head per tap." },
  "tap residual": { title: "tap residual", words: "Distance of that kernel's taps from the span of the heads' mean maps: 0 if value weights can form any such kernel." },
  redundancy: { title: "redundancy", words: "Mean cosine similarity between the profiles of two heads: 1 if all heads are the same." },
  "receptive field": { title: "field", words: "Receptive field: root mean square extent of the heads' mean profile, in tokens." },
  "3 x 3 missed": { title: "3 × 3 missed", words: "Relative part of 3 × 3 kernels that the layer cannot express: 0 if it can express all of them." },
  "rounding of scores": { title: "rounding", words: "Error of the stored scores, in nats: half its range within a row." },
  "queries stored": { title: "queries stored", words: "Number of queries whose rows are stored." },
};

/** Return a column's title and description; an unknown statistic has its own name as title. */
export const columnNamed = (name: string): Column =>
  Object.hasOwn(COLUMNS, name) ? COLUMNS[name]! : { title: name, words: "" };
