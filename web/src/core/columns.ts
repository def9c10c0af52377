/** Titles and one-line descriptions, with units, of the columns of the statistics tables. */
export interface Column {
  readonly title: string;
  readonly words: string;
}

const COLUMNS: Readonly<Record<string, Column>> = {
  layer: { title: "layer", words: "Name of the module. Layers are in order of execution." },
  head: { title: "head", words: "Index of the head in its layer, from 0." },
  "best row": { title: "best row", words: "Row of the shift with the highest mean probability, in tokens; positive is down." },
  "best column": { title: "best column", words: "Column of the shift with the highest mean probability, in tokens; positive is right." },
  mass: { title: "best mass", words: "Mean probability at the best shift: 1 if the head attends only to that shift, as one tap of a convolution does." },
  constancy: { title: "constancy", words: "How constant the attention pattern is as the query moves: 1 if it is the same for all queries, even if it is spread over many shifts." },
  entropy: { title: "entropy", words: "Mean entropy of a query's probabilities, in nats: 0 if all attention is on one token, log n if it is spread equally over n tokens." },
  distance: { title: "distance", words: "Mean distance from the query to the attended tokens, in tokens." },
  "mass elsewhere": { title: "elsewhere", words: "Mean probability outside the image's tokens: on class tokens, registers or padding." },
  "content share": { title: "content", words: "Fraction of the variance of the probabilities that is due to differences between images: 0 if attention depends only on positions." },
  "gaussian overlap": { title: "Gaussian", words: "Overlap with the Gaussian of the same mean and covariance: 1 if the pattern is Gaussian." },
  score: { title: "score", words: "Convolution score: the share of attention that a convolution accounts for, corrected for chance: 1 for a convolution, 0 for uniform attention." },
  coverage: { title: "coverage", words: "Mean probability at the taps of the largest kernel that the heads can form, one head per tap." },
  "tap residual": { title: "tap residual", words: "Relative distance of the taps of the coverage kernel from the span of the heads' mean maps: 0 if value weights can form any kernel of that size." },
  redundancy: { title: "redundancy", words: "Mean cosine similarity between two heads' mean maps over shifts: 1 if all heads have the same map." },
  "receptive field": { title: "field", words: "Receptive field: root mean square distance of the shifts in the heads' mean map from their mean, in tokens." },
  "3 x 3 missed": { title: "3 × 3 residual", words: "Relative norm of the part of 3 × 3 kernels that the layer cannot express: 0 if it can express all of them." },
  "rounding of scores": { title: "rounding", words: "Rounding error of the stored scores, in nats: half of the range of the errors within a row." },
  "queries stored": { title: "queries stored", words: "Number of queries whose rows are stored." },
};

/** Return a column's title and description; an unknown statistic has its own name as title. */
export const columnNamed = (name: string): Column =>
  Object.hasOwn(COLUMNS, name) ? COLUMNS[name]! : { title: name, words: "" };
