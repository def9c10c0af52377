import { mount } from "svelte";
import "./app.css";
import "./testHooks";
import App from "./App.svelte";

const target = document.getElementById("app");
if (target === null) throw new Error("index.html: must contain an element with the id 'app'");
mount(App, { target });
