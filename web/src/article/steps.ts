/** The article, step by step: words, equations, which figure, and how the step sets it up. */
import type { ArticleState } from "../state/article";
import { hat, line, row, sub, subsup, sumOver, sup, words } from "./mathml";

export type Figure =
  | "convolution"
  | "mixture"
  | "shuffle"
  | "terms"
  | "parabola"
  | "sharp"
  | "theorem"
  | "borders"
  | "found"
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
      "A convolution makes each output pixel from its neighbours. A neighbour is named by its shift δ from the output pixel, so many rows down and so many columns to the right.",
      "Every shift has a weight, the same all over the image. Add up neighbour times weight and the output pixel is there. Step through the nine shifts, or move the pixel.",
    ],
    equation: [line(sub("y", "q"), "=", sumOver(shift), x("q + δ"), sub("w", shift))],
    figure: "convolution",
    settings: { shifts: 3, kernel: "gaussian", query: [10, 14] },
  },
  {
    title: "Self-attention mixes pixels",
    paragraphs: [
      "A head of self-attention also makes each output pixel from other pixels, but from all of them. It gives every key pixel k a score, and the softmax turns the scores of one query q into probabilities p that sum to 1.",
      "The head passes on the mixture under these probabilities, times a matrix W of its own. A layer adds up what its heads pass on. Here are four heads: three look at places, one looks for pixels as grey as the query.",
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
      "Let a score depend on content alone, on what the two pixels hold. Then nothing in the layer knows where a pixel stands.",
      "Shuffle the pixels and the outputs move with them, each unchanged. An image and its shuffled copy are the same to such a layer. Let the head see positions and this ends.",
    ],
    equation: [line(sub("a", "q , k"), "=", x("q"), query, key, turned("x"))],
    figure: "shuffle",
    settings: { shuffle: 7, query: [4, 5] },
  },
  {
    title: "Four terms of a score",
    paragraphs: [
      "The first remedy gives each pixel a vector p for its place and adds it to the pixel's own x. Multiplied out, the score has four terms: each side of the product is content or position.",
      "Only the last term does not look at the image at all. A convolution does not choose its neighbours by what they hold, so this is the term that it needs.",
    ],
    equation: [
      line(sub("a", "q , k"), "=", "(", x("q"), "+", p("q"), ")", "W", sup(row("(", x("k"), "+", p("k"), ")"), "⊤")),
      line("=", x("q"), "W", turned("x"), "+", x("q"), "W", turned("p")),
      line("+", p("q"), "W", turned("x"), "+", p("q"), "W", turned("p")),
      line("W =", query, key),
    ],
    figure: "terms",
    settings: { query: [3, 5] },
  },
  {
    title: "Scores of shifts, and a parabola",
    paragraphs: [
      "A convolution treats a shift alike wherever it happens. So does the relative score: the vector r stands for the shift δ = k − q, and of the four terms only the last, v · r, does not look at the image.",
      "Three numbers are enough for r, the squared length of the shift and its two parts. With the right v this term is a parabola over the shifts: its top lies at the centre Δ, and α says how steep it falls. Move both.",
    ],
    equation: [
      line(sub("a", "q , k"), "=", x("q"), "W", turned("x"), "+", x("q"), hat("W"), sub("r", shift)),
      line("+ u", turned("x"), "+", sup("v", "⊤"), sub("r", shift)),
      line(sub("r", shift), "=", "(", sup("‖ δ ‖", "2"), ",", sub("δ", "1"), ",", sub("δ", "2"), ")"),
      line("v =", "−α", "( 1 , −2", sub("Δ", "1"), ", −2", sub("Δ", "2"), ")"),
      line(sup("v", "⊤"), sub("r", shift), "=", "−α", sup("‖ δ − Δ ‖", "2"), "+ α", sup("‖ Δ ‖", "2")),
    ],
    figure: "parabola",
    settings: { alpha: 0.3, centre: [-1, 1.5] },
  },
  {
    title: "Sharpen one head",
    paragraphs: [
      "The last part of the score is the same for all keys, and the softmax drops it. What remains is a bell around the centre. Raise α and the bell closes over the nearest pixel.",
      "The mass that stays off this pixel has a bound that falls like exp(−α). From α of about 18 the rest is lost in the rounding of single precision: the head reads one pixel at a fixed shift, and nothing else.",
    ],
    equation: [
      line("1 −", sub("p", "Δ"), "≤ 1 −", "S", sup("( α )", "−2")),
      line("S ( α ) =", sumOver("n"), sup("e", row("−α", sup("n", "2")))),
    ],
    figure: "sharp",
    settings: { alpha: 0.7, centre: [-1, 1] },
  },
  {
    title: "Nine heads are a 3 × 3 kernel",
    paragraphs: [
      "Give each of nine sharp heads one shift of a 3 × 3 kernel, and let its value matrix be the kernel's slice for this shift. The layer then adds up shifted pixels times weights, and that is the convolution.",
      "K × K heads do it for a kernel of K × K. Press “Hard”, then soften the heads: the error grows, and stays below what theory allows.",
    ],
    equation: [
      line(sumOver("h"), sumOver("k"), subsup("p", "q , k", "h"), x("k"), sup("W", "h"), "=", sumOver(shift), x("q + δ"), sub("W", shift)),
      line(sub("N", "h"), "= K × K"),
    ],
    figure: "theorem",
    settings: { alpha: 2, query: [12, 20] },
  },
  {
    title: "Borders, and a head too few",
    paragraphs: [
      "The proof asks that heads and shifts be matched one to one. Take a head out, or put two heads on one shift, and some weight of the kernel has no pixel to act on: no value matrices mend that for every kernel.",
      "At the border a head may aim at a pixel that does not exist. A softmax over the image alone takes the nearest pixel inside instead, as if the edge were repeated. Zeros around the image, as most convolutions have them, must be keys as well.",
    ],
    equation: [line("f :", "{ 1 , … ,", sub("N", "h"), "}", "→", sub("Δ", "K"), words("one to one"))],
    figure: "borders",
    settings: { alpha: 40, border: "renormalise", query: [0, 12], kernel: "box" },
  },
  {
    title: "What training found",
    paragraphs: [
      "Heads can convolve; do they? The paper trained networks of six attention layers with nine heads each on CIFAR-10. Centres began at random, and in the first layers they came to rest on separate pixels close to the query, much like a grid.",
      "Later layers sent more of their heads farther out. Heads that learn a score for every shift did likewise: in the first two layers many came to look at single pixels, though nothing in their form asks for it.",
    ],
    equation: [],
    figure: "found",
    settings: { query: [6, 6] },
  },
  {
    title: "Where it holds, and where it does not",
    paragraphs: [
      "The theorem says what a layer can do, not what it must. Heads that also look at content choose other pixels at every query, most of all in deeper layers. No kernel does this, and here attention is more than a convolution.",
      "Raise the weight of content and watch one head leave its fixed pattern. Then measure your own: `attnconv audit MODEL` says how much of a convolution each layer is, and `attnconv recast MODEL` turns the convolutions of a network into attention that computes the same.",
    ],
    equation: [line(sub("a", "q , k"), "=", "−α", sup("‖ δ − Δ ‖", "2"), "−", "γ", sup(row("(", x("q"), "−", x("k"), ")"), "2"))],
    figure: "limits",
    settings: { alpha: 0.5, centre: [-1, 1], content: 60, query: [6, 9] },
  },
];
