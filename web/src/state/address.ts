/** The state in the address bar. Written at most four times a second: browsers refuse more than some hundred a minute. */
import { START, type State, type View, fromHash, toHash, viewIn } from "./state";

const PAUSE = 250; // milliseconds

/** Whether this page has an address that it may write; a page inside a notebook's srcdoc has none. */
const addressed = (): boolean => ["file:", "http:", "https:"].includes(location.protocol);

/** Where the visitor is; back in the browser leads from place to place. */
const placeOf = ({ view, article }: State): string => (view === "article" ? `${view} ${article.step}` : view);

export class Address {
  private shown = "";
  private place = "";
  private waiting: ReturnType<typeof setTimeout> | null = null;
  /** The view of an address that names none. */
  private home: View = START.view;

  /** Whether the visitor followed a link to some view. */
  get linked(): boolean {
    return addressed() && viewIn(location.hash) !== null;
  }

  /** The state at the start, or again with another view as the one that an address without a view stands for. */
  start(home: View = this.home): State {
    this.home = home;
    const state = fromHash(addressed() ? location.hash : "", home);
    this.shown = location.hash;
    this.place = placeOf(state);
    return state;
  }

  /** Writes the state soon; another view or step is another entry in the browser's history. */
  show(state: State): void {
    if (!addressed()) return;
    if (this.waiting !== null) clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      this.waiting = null;
      const hash = toHash(state);
      if (hash === this.shown) return;
      this.write(hash, placeOf(state) !== this.place);
      this.shown = hash;
      this.place = placeOf(state);
    }, PAUSE);
  }

  private write(hash: string, another: boolean): void {
    try {
      if (another) history.pushState(null, "", hash);
      else history.replaceState(null, "", hash);
    } catch {
      // A browser that refuses, in a sandboxed frame say, costs the link and nothing else.
    }
  }

  /** Calls `restore` when the visitor follows a link into the page or goes back. */
  watch(restore: (state: State) => void): () => void {
    const changed = (): void => {
      if (location.hash === this.shown) return;
      restore(this.start());
    };
    addEventListener("popstate", changed);
    return () => removeEventListener("popstate", changed);
  }
}
