import { mount } from "svelte";
import "./app.css";
import "./check";
import App from "./App.svelte";

const target = document.getElementById("app");
if (target === null) throw new Error("index.html: must hold an element with the id 'app'");
mount(App, { target });
