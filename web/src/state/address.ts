/** The state in the address bar, written at most four times per second: browsers limit the rate of changes. */
import { START, type State, type View, fromHash, toHash, viewIn } from "./state";

const PAUSE = 250; // milliseconds

/** Whether the page has a URL that it can change; a page in a notebook's srcdoc frame has none. */
export const addressed = (): boolean => ["file:", "http:", "https:"].includes(location.protocol);

/** Return the visitor's location: each new location is an entry in the browser's history. */
function placeOf({ view, article, model }: State): string {
  if (view === "article") return `${view} ${article.step}`;
  return view === "model" ? `${view} ${model.own} ${model.second}` : view;
}

/** Start of the location of a model explorer without one of the page's models: going back to it would not change the model. */
const UNLISTED = "model  ";

export class Address {
  private shown = "";
  private place = "";
  private waiting: ReturnType<typeof setTimeout> | null = null;
  /** The view of a URL that names none. */
  private home: View = START.view;

  /** Whether the visitor followed a link to some view. */
  get linked(): boolean {
    return addressed() && viewIn(location.hash) !== null;
  }

  /** Return the state in the URL; `home` is the view if the URL names none. */
  start(home: View = this.home): State {
    this.home = home;
    const state = fromHash(addressed() ? location.hash : "", home);
    this.shown = location.hash;
    this.place = placeOf(state);
    return state;
  }

  /** Write the state to the URL after a pause; a new view, step or model adds an entry to the browser's history. */
  show(state: State): void {
    if (!addressed()) return;
    if (this.waiting !== null) clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      this.waiting = null;
      const hash = toHash(state);
      if (hash === this.shown) return;
      const place = placeOf(state);
      this.write(hash, place !== this.place && !(this.place.startsWith(UNLISTED) && state.view === "model" && state.model.own !== ""));
      this.shown = hash;
      this.place = place;
    }, PAUSE);
  }

  private write(hash: string, another: boolean): void {
    try {
      if (another) history.pushState(null, "", hash);
      else history.replaceState(null, "", hash);
    } catch {
      // Some browsers refuse, for example in a sandboxed frame. Then only the link is missing.
    }
  }

  /** Call `restore` when the visitor follows a link into the page or goes back. */
  watch(restore: (state: State) => void): () => void {
    const changed = (): void => {
      if (location.hash === this.shown) return;
      restore(this.start());
    };
    addEventListener("popstate", changed);
    return () => removeEventListener("popstate", changed);
  }
}
