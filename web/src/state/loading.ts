/** Loading of the payload: embedded in the page, or from the server. */

/** Return the payload's bytes, or null if there is none. */
export async function findPayload(): Promise<ArrayBuffer | null> {
  const embedded = document.getElementById("attnconv-payload")?.textContent?.trim();
  if (embedded) return fromBase64(embedded);
  return served() ? fetchPayload() : null;
}

/** Whether the page comes from the library's server; otherwise the page makes no requests. */
export function served(): boolean {
  return location.protocol.startsWith("http") && mark() !== null;
}

/** Whether the server accepts images, that is, has a model to run on them. */
export function takesImages(): boolean {
  return served() && mark() === "images";
}

function mark(): string | null {
  return document.querySelector('meta[name="attnconv-server"]')?.getAttribute("content") ?? null;
}

/** Send an image to the server and return the new payload. */
export async function sendImage(picture: Blob): Promise<ArrayBuffer> {
  return bytesOf(await asked("image", { method: "POST", body: picture }));
}

async function fetchPayload(): Promise<ArrayBuffer | null> {
  const answer = await asked("payload");
  return answer.status === 404 ? null : bytesOf(answer);
}

/** Fetch from the server. The browser's own error, "Failed to fetch", would not tell the visitor what to do. */
async function asked(path: string, options: RequestInit = {}): Promise<Response> {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("The page's server does not respond. If it was stopped, run `attnconv explore` again and open the address that it prints.");
  }
}

async function bytesOf(answer: Response): Promise<ArrayBuffer> {
  if (answer.ok) return answer.arrayBuffer();
  const said: unknown = await answer.json().catch(() => null);
  const words = typeof said === "object" && said !== null && "error" in said ? String(said.error) : answer.statusText;
  throw new Error(words || `The server returned status ${answer.status}.`);
}

function fromBase64(text: string): ArrayBuffer {
  let decoded: string;
  try {
    decoded = atob(text);
  } catch {
    throw new Error("payload: must be embedded in the page as base64. Export the page again.");
  }
  return Uint8Array.from(decoded, (letter) => letter.charCodeAt(0)).buffer;
}
