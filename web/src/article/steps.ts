/** The steps of the article: text, equations, figure, and the figure's initial settings. */
import type { ArticleState } from "../state/article";
import { hat, line, row, sub, subsup, sumOver, sup, term, words } from "./mathml";

export type Figure =
  | "convolution"
  | "mixture"
  | "shuffle"
  | "terms"
  | "parabola"
  | "sharp"
  | "theorem"
  | "borders"
  | "trained"
  | "limits";

export interface Step {
  readonly title: string;
  readonly paragraphs: readonly string[];
  /** MathML, one entry for each line. */
  readonly equation: readonly string[];
  readonly figure: Figure;
  readonly settings: Partial<ArticleState>;
}

const query = sub("W", "qry");
const key = subsup("W", "key", "⊤");
const x = (place: string): string => sub("x", place);
const p = (place: string): string => sub("p", place);
const shift = row("δ");
const turned = (side: "x" | "p"): string => subsup(side, "k", "⊤");

export const STEPS: readonly Step[] = [
  {
    title: "A convolution, shift by shift",
    paragraphs: [
      "A convolution computes each output pixel from the input pixels around it. Each of these neighbours is identified by its shift δ: the number of rows down and of columns to the right, relative to the output pixel.",
      "Every shift has a weight, which is the same everywhere in the image. The output pixel is the sum over all shifts of the neighbour's value times the weight of its shift. Step through the nine shifts, or move the output pixel.",
    ],
    equation: [line(sub("y", "q"), "=", sumOver(shift), x("q + δ"), sub("w", shift))],
    figure: "convolution",
    settings: { shifts: 3, kernel: "gaussian", query: [10, 14] },
  },
  {
    title: "Self-attention mixes pixels",
    paragraphs: [
      "A self-attention head also computes each output pixel from input pixels, but it uses all of them. For each output pixel q (the query), every input pixel k (a key) gets a score a, and the softmax turns these scores into probabilities p that sum to 1.",
      "Each head averages the pixels, weighted by these probabilities, and multiplies the result by its own matrix W. The layer sums the outputs of its heads. In the example, three of four heads attend by position, and one attends to pixels with grey levels similar to the query's.",
    ],
    equation: [
      line(sub("y", "q"), "=", sumOver("h"), sumOver("k"), subsup("p", "q , k", "h"), x("k"), sup("W", "h")),
      line(subsup("p", "q , k", "h"), "=", sup("e", subsup("a", "q , k", "h")), "/", sumOver("m"), sup("e", subsup("a", "q , m", "h"))),
    ],
    figure: "mixture",
    settings: { query: [9, 13] },
  },
  {
    title: "Without positions, order is lost",
    paragraphs: [
      "Suppose that a score depends only on content, that is, on the values of the two pixels. Then the layer does not know where a pixel is in the image.",
      "If you shuffle the pixels, the outputs are shuffled in the same way, and their values do not change. The order of the pixels has no effect on any output value. This is no longer true when the head also uses positions.",
    ],
    equation: [line(sub("a", "q , k"), "=", x("q"), query, key, turned("x"))],
    figure: "shuffle",
    settings: { shuffle: 7, query: [4, 5] },
  },
  {
    title: "Four terms of a score",
    paragraphs: [
      "One solution is to add a vector p for each pixel's position to its content vector x. The score then expands into four terms, because each of its two vectors is a sum of content and position.",
      "Only the last term is independent of the image. A convolution does not select neighbours by their content, so this is the only term that it needs.",
    ],
    equation: [
      line(sub("a", "q , k"), "=", row("(", x("q"), "+", p("q"), ")"), "W", sup(row("(", x("k"), "+", p("k"), ")"), "⊤")),
      line("=", term(0, x("q"), "W", turned("x")), "+", term(1, x("q"), "W", turned("p"))),
      line("+", term(2, p("q"), "W", turned("x")), "+", term(3, p("q"), "W", turned("p"))),
      line("W =", query, key),
    ],
    figure: "terms",
    settings: { query: [3, 5] },
  },
  {
    title: "Relative positions and a parabola",
    paragraphs: [
      "A convolution treats a shift the same way everywhere in the image. So does a score with relative positions: a vector r encodes the shift δ = k − q, and of the four terms only the last, v · r, is independent of the image.",
      "Three numbers are enough for r: the squared length of the shift and its two components. With a suitable v, this term is a parabola in the shift: its maximum is at the centre Δ, and α determines its steepness. Change both to see the effect.",
    ],
    equation: [
      line(sub("a", "q , k"), "=", x("q"), "W", turned("x"), "+", x("q"), hat("W"), sub("r", shift)),
      line("+ u", turned("x"), "+", sup("v", "⊤"), sub("r", shift)),
      line(sub("r", shift), "=", row("(", sup("‖ δ ‖", "2"), ",", sub("δ", "1"), ",", sub("δ", "2"), ")")),
      line("v =", "−α", row("( 1 , −2", sub("Δ", "1"), ", −2", sub("Δ", "2"), ")")),
      line(sup("v", "⊤"), sub("r", shift), "=", "−α", sup("‖ δ − Δ ‖", "2"), "+ α", sup("‖ Δ ‖", "2")),
    ],
    figure: "parabola",
    settings: { alpha: 0.3, centre: [-1, 1.5] },
  },
  {
    title: "Sharpening one head",
    paragraphs: [
      "The constant α‖Δ‖² is the same for all keys, so it cancels in the softmax. What remains is a Gaussian around the centre, and as α grows it concentrates on the pixel nearest to the centre.",
      "If the centre is exactly on a pixel, the total probability of all other pixels is bounded by a term that decreases like exp(−α). For α above about 18, this probability is smaller than the rounding error of single precision, so the head reads exactly one pixel at a fixed shift.",
    ],
    equation: [
      line("1 −", sub("p", "Δ"), "≤ 1 −", "S", sup("( α )", "−2")),
      line("S ( α ) =", sumOver("n"), sup("e", row("−α", sup("n", "2")))),
    ],
    figure: "sharp",
    settings: { alpha: 0.7, centre: [-1, 1] },
  },
  {
    title: "Nine heads form a 3 × 3 kernel",
    paragraphs: [
      "Assign each shift of a 3 × 3 kernel to one of nine sharp heads, and set the head's value matrix to the kernel's weights at this shift. The layer then sums the shifted pixels times their weights, which is the convolution.",
      "In the same way, K × K heads express any K × K kernel. Click “Hard heads” and watch the difference disappear, then lower α to make the heads softer: the error grows, but it stays below the proven bound.",
    ],
    equation: [
      line(sumOver("h"), sumOver("k"), subsup("p", "q , k", "h"), x("k"), sup("W", "h"), "=", sumOver(shift), x("q + δ"), sub("W", shift)),
      line(sub("N", "h"), "= K × K"),
    ],
    figure: "theorem",
    settings: { alpha: 2, query: [12, 13] },
  },
  {
    title: "Borders and missing heads",
    paragraphs: [
      "The proof requires a one-to-one assignment of heads to shifts. If a head is missing, or two heads share a shift, one tap of the kernel has no head, and no choice of value matrices can fix this for every kernel.",
      "At the border, a head may point to a pixel outside the image. A softmax over the image then selects the nearest pixel inside, as if the edge were repeated. Most convolutions use zero padding instead, and to match them the softmax must include the zeros as keys.",
    ],
    equation: [line("f :", "{ 0 , … ,", sub("N", "h"), "− 1 }", "→", sub("Δ", "K"), words("one to one"))],
    figure: "borders",
    settings: { alpha: 40, border: "renormalise", query: [0, 12], kernel: "box" },
  },
  {
    title: "What trained heads learn",
    paragraphs: [
      "Heads can express a convolution, but do they learn one? The paper trained networks with six attention layers of nine heads on CIFAR-10. The centres were initialised at random, and in the first layers they settled on different pixels close to the query, arranged much like a grid.",
      "In later layers, more heads attended to distant pixels. Heads that learn a separate score for every shift behaved similarly: in the first two layers many learned to attend to single pixels, although nothing in their parametrisation favours this.",
    ],
    equation: [],
    figure: "trained",
    settings: { query: [] },
  },
  {
    title: "Limits of the theorem",
    paragraphs: [
      "The theorem states what a layer can express, not what it learns. Heads that also use content attend to different shifts for different queries, especially in deeper layers. A convolution cannot do this.",
      "Increase the weight of the content to see how a head departs from its fixed pattern. For your own model, `attnconv audit MODEL` measures how close each layer is to a convolution, and `attnconv recast MODEL` replaces the convolutions of a network with equivalent attention layers.",
    ],
    equation: [line(sub("a", "q , k"), "=", "−α", sup("‖ δ − Δ ‖", "2"), "−", "γ", sup(row("(", x("q"), "−", x("k"), ")"), "2"))],
    figure: "limits",
    settings: { alpha: 0.5, centre: [-1, 1], content: 60, query: [12, 14] },
  },
];
