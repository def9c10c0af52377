import { describe, expect, test } from "vitest";
import { benchOf, besideZeros, twoOnOneShift } from "../src/article/benchSettings";
import {
  type Head, attentionRow, embedded, fourTerms, mixed, outputOf, patternOf, probabilities, reordered, shuffled, shuffling, summed,
} from "../src/article/examples";
import { SKETCH_SIZE, firstImage, layerMaps, sketchedMaps } from "../src/article/attentionMaps";
import { line, sub } from "../src/article/mathml";
import { STEPS } from "../src/article/steps";
import { result, setup } from "../src/core/bench";
import { massOffNearest } from "../src/core/bounds";
import { openPayload } from "../src/core/payload";
import { attentionOf } from "../src/core/theorem";
import { type ArticleState, atStep, checkedArticle } from "../src/state/article";
import { hard, oneMissing } from "../src/state/bench";
import { START, fromHash, reduce, toHash } from "../src/state/state";
import { picture } from "./pictures";
import { apart, fixture } from "./readFixture";

const total = (values: ArrayLike<number>): number => Array.from(values).reduce((sum, value) => sum + value, 0);
const image = picture("disc", 12);

describe("steps", () => {
  test.each(STEPS.map((step, index) => ({ ...step, index })))("$index: $title", ({ title, paragraphs, equation, index }) => {
    expect(title.length).toBeLessThan(50);
    const sentences = paragraphs.join(" ").split(/[.?!](?: |$)/).filter(Boolean);
    expect(sentences.length).toBeGreaterThanOrEqual(2);
    expect(sentences.length).toBeLessThanOrEqual(5);
    for (const sentence of sentences) expect(sentence.split(" ").length).toBeLessThanOrEqual(36);
    for (const math of equation) expect(opened(math)).toEqual([]);
    expect(checkedArticle(atStep(index + 1))).toEqual(atStep(index + 1));
  });

  test("each has its own figure", () => {
    expect(STEPS.length).toBe(10);
    expect(new Set(STEPS.map(({ figure }) => figure)).size).toBe(STEPS.length);
  });
});

/** Return the elements that a markup does not close, or the first wrong closing tag. */
function opened(markup: string): string[] {
  const open: string[] = [];
  for (const [, slash, name] of markup.matchAll(/<(\/?)(\w+)[^>]*>/g)) {
    if (!slash) open.push(name!);
    else if (open.pop() !== name) return [`</${name}>`];
  }
  return open;
}

test("names, numbers and operators become MathML", () => {
  expect(line(sub("W", "qry"), "= 2 < x")).toBe(
    '<math display="block"><mrow><msub><mrow><mi>W</mi></mrow><mrow><mi>qry</mi></mrow></msub><mo>=</mo><mn>2</mn><mo>&lt;</mo><mi>x</mi></mrow></math>',
  );
});

test("parentheses and norm bars are rows of their own and do not stretch", () => {
  const mark = (form: string, sign: string): string => `<mo form="${form}" stretchy="false">${sign}</mo>`;
  expect(line("S ( α )")).toContain(`<mi>S</mi><mrow>${mark("prefix", "(")}<mi>α</mi>${mark("postfix", ")")}</mrow>`);
  expect(line("‖ x ‖ + ‖ y ‖").match(/prefix/g)).toHaveLength(2);
  for (const { equation } of STEPS) {
    for (const math of equation) {
      expect(math).not.toMatch(/<mo>[(){}‖]/);
      expect(opened(math)).toEqual([]);
    }
  }
});

describe("a link to the article", () => {
  test.each([0, ...STEPS.map((_, index) => index + 1)])("contains only step %i, and restores the step's settings", (index) => {
    const state = { ...START, view: "article" as const, article: atStep(index) };
    expect(toHash(state)).toBe(index === 0 ? "#view=article" : `#view=article&article.step=${index}`);
    expect(fromHash(toHash(state))).toEqual(state);
  });

  test("restores the reader's changes", () => {
    const change: Partial<ArticleState> = { ...atStep(5), alpha: 2.5, centre: [0.5, -2], query: [1, 2], terms: [0, 1, 0, 1], offsets: twoOnOneShift().offsets! };
    const state = reduce(START, { type: "article", change });
    expect(state.article.alpha).toBe(2.5);
    expect(fromHash(toHash(state))).toEqual(state);
  });

  test("with values out of range is clamped", () => {
    const { article } = fromHash("#article.step=99&article.alpha=0&article.shifts=40&article.centre=9&article.border=none&article.missing=12&article.content=-3&article.terms=5");
    expect(article).toEqual({ ...atStep(10), alpha: 0.1, shifts: 9, centre: [4, 0], content: 0 });
  });
});

describe("shuffled pixels", () => {
  const content: Head = { near: 0, alike: 60, centre: [0, 0] };

  test("are a permutation that depends only on the seed", () => {
    const order = shuffled(144, 7);
    expect(order).toEqual(shuffled(144, 7));
    expect(order).not.toEqual(shuffled(144, 8));
    expect([...order].sort((a, b) => a - b)).toEqual(shuffled(144, 0));
  });

  test("give shuffled outputs for a content-only head, and other outputs for a head with positions", () => {
    for (const seed of [1, 2, 3]) {
      const order = shuffled(144, seed);
      expect(shuffling(image, order, content).apart).toBeLessThan(1e-14);
      expect(shuffling(image, order, { ...content, near: 0.5 }).apart).toBeGreaterThan(0.01);
    }
    expect(shuffling(image, shuffled(144, 0), content).apart).toBe(0);
  });

  test("a head outputs the mean of the image under its probabilities", () => {
    const row = attentionRow(image, 30, content);
    expect(total(row.data)).toBeCloseTo(1, 12);
    expect(mixed(row, image)).toBeCloseTo(outputOf(image, content).data[30]!, 14);
    expect(reordered(image, [3, 0]).data).toEqual(Float64Array.from([image.data[3]!, image.data[0]!]));
  });
});

test("the article's position head is the theorem's head", () => {
  const heads = { alpha: 0.7, centres: [[-1, 1.5]] as const, weights: [1], present: [true] };
  const geometry = { width: 3, stride: 1, dilation: 1, border: "renormalise" } as const;
  const row = attentionRow(image, 5 * 12 + 3, { near: 0.7, alike: 0, centre: [-1, 1.5] });
  expect(apart(row.data, attentionOf([12, 12], [5, 3], heads, 0, geometry).data)).toBeLessThan(1e-14);
});

test("the probability outside the nearest pixel stays below the bound", () => {
  const blank = { height: 11, width: 11, data: new Float64Array(121) };
  for (const alpha of [0.1, 0.7, 3, 20, 50]) {
    for (const aside of [0, 0.3, 0.5]) {
      const { data } = attentionRow(blank, 60, { near: alpha, alike: 0, centre: [-1, 1 + aside] });
      const target = 4 * 11 + 6;
      const off = total(data.filter((_, key) => key !== target));
      expect(off).toBeLessThanOrEqual(massOffNearest(alpha, [0, aside]) * (1 + 1e-12));
    }
  }
});

describe("the four terms", () => {
  const query = 41;
  const terms = fourTerms(image, query);

  test("sum to the score of content plus position", () => {
    const { matrix, contents, places } = embedded(image);
    const both = contents.map((content, pixel) => content.map((part, at) => part + places[pixel]![at]!));
    const direct = both.map((to) => matrix.reduce((sum, weights, i) => sum + both[query]![i]! * total(weights.map((weight, j) => weight * to[j]!)), 0));
    expect(apart(summed(terms, [1, 1, 1, 1]).data, direct)).toBeLessThan(1e-13);
  });

  test("only the last is independent of the image", () => {
    const other = fourTerms(picture("stripes", 12), query);
    expect(terms.map((term, index) => apart(term.data, other[index]!.data) > 1e-3)).toEqual([true, true, true, false]);
  });

  test("no terms give all pixels the same probability", () => {
    const { data } = probabilities(summed(terms, [0, 0, 0, 0]));
    expect(apart(data, new Array(144).fill(1 / 144))).toBeLessThan(1e-15);
  });
});

describe("compared with a zero-padded convolution", () => {
  const found = (change: Partial<ArticleState>) => {
    const set = setup(benchOf({ ...atStep(8), ...change }), null);
    return besideZeros(set, result(set).attention);
  };

  test("hard heads are equal if zeros are keys, and otherwise differ at the border", () => {
    const zeros = found({ ...hard(), border: "zero" });
    expect(Math.max(zeros.inside, zeros.border)).toBeLessThan(1e-13);
    const alone = found(hard());
    expect(alone.inside).toBeLessThan(1e-13);
    expect(alone.border).toBeGreaterThan(0.01);
  });

  test("a missing head, or two heads at one shift, cause errors everywhere", () => {
    for (const change of [oneMissing(3), twoOnOneShift()]) expect(found({ ...change, border: "zero" }).inside).toBeGreaterThan(0.01);
  });
});

test("the workbench takes its settings from the article's step", () => {
  const article = { ...atStep(7), alpha: 7, missing: [2], border: "circular", query: [3, 9] };
  expect(benchOf(article)).toMatchObject({ alpha: 7, missing: [2], border: "circular", query: [3, 9], kernel: "sharpen", size: 32 });
});

describe("a head's fixed pattern", () => {
  const head: Head = { near: 0.5, alike: 0, centre: [-1, 1] };

  test("is complete for a position-only head, and less so the larger the weight of content", () => {
    const moves = [0, 2, 40].map((alike) => patternOf(image, { ...head, alike }, 3).moves);
    expect(moves[0]!).toBeLessThan(1e-14);
    expect(moves[1]!).toBeGreaterThan(0.001);
    expect(moves[2]!).toBeGreaterThan(2 * moves[1]!);
    expect(moves[2]!).toBeLessThan(1);
  });

  test("sums to one", () => {
    expect(total(patternOf(image, { ...head, alike: 10 }, 3).mean.data)).toBeCloseTo(1, 12);
  });
});

describe("heads of a payload", () => {
  const payload = openPayload(fixture("payload.safetensors"));

  test("are rows of probabilities for its first layers", () => {
    const layers = layerMaps(payload, [2, 1]);
    expect(layers.length).toBe(3);
    for (const { maps, query } of layers) {
      for (const { data } of maps) expect(total(data)).toBeCloseTo(1, 3);
      expect(query).toEqual([2, 1]);
    }
  });

  test("have the first image in its colours, and the heads' planes", () => {
    const { height, width, colours } = firstImage(payload)!;
    const pixels = payload.images!;
    expect([height, width]).toEqual(pixels.shape.slice(1, 3));
    expect(Array.from(colours!.slice(4, 8))).toEqual([...pixels.data.slice(3, 6), 255]);
    for (const { plane, heads, range } of layerMaps(payload, [2, 1])) {
      expect(plane.length).toBe(heads);
      expect(range).toBeGreaterThan(1);
    }
  });

  test("are sketched if there is no payload", () => {
    for (const { maps } of sketchedMaps([8, 8])) {
      expect(maps.length).toBe(9);
      for (const { data } of maps) expect([data.length, total(data)]).toEqual([SKETCH_SIZE ** 2, expect.closeTo(1, 12)]);
    }
  });
});
