/** Where the page finds its payload: inside itself, or at the server that it came from. */

/** The payload's bytes, or null where there is none. */
export async function findPayload(): Promise<ArrayBuffer | null> {
  const embedded = document.getElementById("attnconv-payload")?.textContent?.trim();
  if (embedded) return fromBase64(embedded);
  return served() ? fetchPayload() : null;
}

/** Whether the library's own server sent this page: only then is anything requested. */
export function served(): boolean {
  return location.protocol.startsWith("http") && mark() !== null;
}

/** Whether that server also takes pictures: it has a model to send them through. */
export function takesImages(): boolean {
  return served() && mark() === "images";
}

function mark(): string | null {
  return document.querySelector('meta[name="attnconv-server"]')?.getAttribute("content") ?? null;
}

/** Sends a picture to the server and gets a payload back. */
export async function sendImage(picture: Blob): Promise<ArrayBuffer> {
  return bytesOf(await asked("image", { method: "POST", body: picture }));
}

async function fetchPayload(): Promise<ArrayBuffer | null> {
  const answer = await asked("payload");
  return answer.status === 404 ? null : bytesOf(answer);
}

/** The server's answer; a browser's own words for none ("Failed to fetch") do not say what to do. */
async function asked(path: string, options: RequestInit = {}): Promise<Response> {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("The server of this page does not answer. It ends with its command: run `attnconv explore` again, and open the address it says.");
  }
}

async function bytesOf(answer: Response): Promise<ArrayBuffer> {
  if (answer.ok) return answer.arrayBuffer();
  const said: unknown = await answer.json().catch(() => null);
  const words = typeof said === "object" && said !== null && "error" in said ? String(said.error) : answer.statusText;
  throw new Error(words || `The server answered ${answer.status}.`);
}

function fromBase64(text: string): ArrayBuffer {
  let decoded: string;
  try {
    decoded = atob(text);
  } catch {
    throw new Error("payload: the page's embedded payload must be base64. Export the page again.");
  }
  return Uint8Array.from(decoded, (letter) => letter.charCodeAt(0)).buffer;
}
