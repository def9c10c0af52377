import { mount } from "svelte";
import "./app.css";
import "./fonts/math.css";
import "./testHooks";
import App from "./App.svelte";
import { decodePhotographs } from "./draw/photographFiles";

const target = document.getElementById("app");
if (target === null) throw new Error("index.html: must contain an element with the id 'app'");
await decodePhotographs().catch(() => {}); // without them the figures are grey, and everything else works
mount(App, { target });
