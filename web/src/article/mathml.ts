/** Build MathML from short strings, such as `line("y = 2 x")`. Browsers render it natively. */

/** Convert numbers, names and operators separated by spaces, and a minus sign attached to a number. MathML is kept as it is. */
function tokens(text: string): string {
  if (text.startsWith("<")) return text;
  return text
    .split(" ")
    .filter((token) => token !== "")
    .map((token) => {
      if (/^−./.test(token)) return `<mrow><mo form="prefix" lspace="0">−</mo>${tokens(token.slice(1))}</mrow>`;
      if (/^[\d.]+$/.test(token)) return `<mn>${token}</mn>`;
      return /^[\p{L}]+$/u.test(token) ? `<mi>${token}</mi>` : `<mo>${token.replace("<", "&lt;")}</mo>`;
    })
    .join("");
}

/** Put each pair of parentheses, braces or norm bars in a row of its own, so that it is not higher than its content. */
function grouped(markup: string): string {
  let bars = 0;
  return markup.replace(/<mo>([(){}‖])<\/mo>/g, (_, sign: string) => {
    const opens = sign === "‖" ? bars++ % 2 === 0 : "({".includes(sign);
    const mark = `<mo form="${opens ? "prefix" : "postfix"}" stretchy="false">${sign}</mo>`;
    return opens ? `<mrow>${mark}` : `${mark}</mrow>`;
  });
}

export const row = (...parts: string[]): string => `<mrow>${grouped(parts.map(tokens).join(""))}</mrow>`;
/** One of several numbered terms, which is linked with its picture. */
export const term = (number: number, ...parts: string[]): string => row(...parts).replace("<mrow>", `<mrow class="term term-${number}">`);
export const sub = (base: string, below: string): string => `<msub>${row(base)}${row(below)}</msub>`;
export const sup = (base: string, above: string): string => `<msup>${row(base)}${row(above)}</msup>`;
export const subsup = (base: string, below: string, above: string): string =>
  `<msubsup>${row(base)}${row(below)}${row(above)}</msubsup>`;
export const hat = (base: string): string => `<mover>${row(base)}<mo>^</mo></mover>`;
export const sumOver = (below: string): string => `<munder><mo>∑</mo>${row(below)}</munder>`;
export const words = (text: string): string => `<mtext>&nbsp;&nbsp;${text}</mtext>`;
export const line = (...parts: string[]): string => `<math display="block">${row(...parts)}</math>`;
