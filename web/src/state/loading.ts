/** Loading of payloads: embedded in the page, from the server, or from scripts next to the page. */
import type { HeadChange } from "../core/headChanges";
import { type Payload, openPayload } from "../core/payload";
import { isRecord } from "../core/safetensors";

const embedded = (): string => document.getElementById("attnconv-payload")?.textContent?.trim() ?? "";

/** Whether a payload may come with the page. */
export const expectsPayload = (): boolean => served() || embedded() !== "";

/** Return the payload's bytes, or null if there is none. */
export async function findPayload(): Promise<ArrayBuffer | null> {
  const text = embedded();
  if (text) return fromBase64(text);
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

/** The visitor's image of each payload. */
const sent = new WeakMap<Payload, Blob>();

/** Send an image to the server and open the new payload. */
export async function sendImage(picture: Blob): Promise<Payload> {
  const payload = openPayload(await bytesOf(await asked("image", { method: "POST", body: picture })));
  sent.set(payload, picture);
  return payload;
}

/** Ask the server for the logits of a payload's images with some heads changed. */
export async function askLogits(payload: Payload, changes: readonly HeadChange[]): Promise<number[][]> {
  const heads: Record<string, Record<number, string>> = {};
  for (const { layer, head, to } of changes) (heads[payload.manifest.layers[layer]!.name] ??= {})[head] = to;
  const answer = await asked(`image?heads=${encodeURIComponent(JSON.stringify(heads))}`, { method: "POST", body: sent.get(payload) ?? null });
  return JSON.parse(new TextDecoder().decode(await bytesOf(answer))) as number[][];
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

/** A model that came with the page, in a script next to it. */
export interface ListedModel {
  readonly title: string;
  /** Address of the script, relative to the page. */
  readonly file: string;
  /** What the model is, in one line; may be missing. */
  readonly about?: string;
}

const SCRIPT = /^(?:[\w-]+\/)*([\w-]+)\.js$/;

/** Return the models that came with the page; entries that are not scripts next to it are ignored. */
export function listedModels(): ListedModel[] {
  let found: unknown = [];
  try {
    found = JSON.parse(document.getElementById("attnconv-models")?.textContent ?? "[]");
  } catch {
    // no models
  }
  const valid = (entry: unknown): entry is ListedModel =>
    isRecord(entry) && typeof entry["title"] === "string" && ["string", "undefined"].includes(typeof entry["about"]) && typeof entry["file"] === "string" && SCRIPT.test(entry["file"]);
  return Array.isArray(found) ? found.filter(valid) : [];
}

const models = new Map<string, Promise<ArrayBuffer>>();
const given = new Map<string, string>();
Object.assign(globalThis, { attnconvModel: (name: string, payload: string) => given.set(name, payload) });

/** Load the payload of a listed model. Its script calls `attnconvModel(name, payload)`: pages on disk cannot fetch files. */
export function loadModel(file: string): Promise<ArrayBuffer> {
  const known = models.get(file);
  if (known) return known;
  const loading = new Promise<ArrayBuffer>((resolve, reject) => {
    const script = document.createElement("script");
    const failed = (): void => {
      models.delete(file); // so that the visitor can try again
      reject(new Error(`The file ${file} next to this page could not be loaded, or is not a model.`));
    };
    script.onerror = failed;
    script.onload = () => {
      const name = SCRIPT.exec(file)?.[1] ?? "";
      const payload = given.get(name);
      given.delete(name);
      if (payload === undefined) failed();
      else resolve(fromBase64(payload));
    };
    script.src = file;
    document.head.append(script);
  });
  models.set(file, loading);
  return loading;
}
