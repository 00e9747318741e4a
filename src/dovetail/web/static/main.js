// Runs the page. It draws the header, reads the address (#/…), and chooses the view.

import {h, moment, select} from "./dom.js";
import {compareView} from "./compare_view.js";
import {planView} from "./plan_view.js";
import {runView} from "./run_view.js";
import {runsView} from "./runs_view.js";
import {source as connect} from "./source.js";

const $ = (id) => document.getElementById(id);
const SHORTCUTS = [
  ["1 to 7", "the tabs of a run"], ["j, k", "the next and the last sample or iteration"], ["/", "the filter of a table or of metrics"],
  ["arrow keys", "in a chart: read values; in a timeline: choose a bar"], ["+, −, 0", "in a chart or timeline: zoom, and see all"], ["?", "this help"],
];
let about, from, stop = new AbortController(), view = {};

function say(text) { if ($("say").textContent !== text) $("say").textContent = text; }

function theme(name) {
  const dark = name === "dark" || (name !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

// A browser may refuse to keep anything for a file.
const remembered = () => { try { return localStorage.getItem("theme") || "system"; } catch { return "system"; } };
const remember = (name) => { try { localStorage.setItem("theme", name); } catch { /* then it holds for this visit */ } };

function header() {
  const kept = remembered();
  const told = from.kind === "file" ? `as of ${moment(about.written)}. ${about.left_out}` : about.demo ? "a recorded run, played" : about.folder || "";
  const parts = [h("h1", {}, h("a", {href: "#/"}, "Dovetail")), h("span", {class: "mute grow"}, told)];
  if (from.kind === "cluster") parts.push(...login());
  parts.push(select("Colours", [["system", "as the system"], ["light", "light"], ["dark", "dark"]], kept, (name) => { remember(name); theme(name); }),
    h("button", {type: "button", onclick: () => $("help").showModal(), "aria-label": "Keyboard help"}, "?"));
  $("head").replaceChildren(...parts);
  theme(kept);
}

function login() {
  const namespace = h("input", {id: "namespace", value: from.namespace, autocomplete: "off", size: 14, placeholder: "all namespaces"});
  const token = h("input", {id: "token", type: "password", autocomplete: "off", placeholder: "kubectl create token …", size: 14});
  const show = () => {
    from.namespace = namespace.value.trim();
    if (token.value) from.token = token.value.trim();
    token.value = "";
    if (location.hash === "#/") route(); else location.hash = "#/";
  };
  for (const box of [namespace, token]) box.addEventListener("keydown", (event) => { if (event.key === "Enter") show(); });
  return [h("label", {}, "Namespace", namespace), h("label", {}, "Bearer token", token), h("button", {type: "button", onclick: show}, "Show")];
}

function help() {
  $("help").replaceChildren(h("h2", {id: "help-title"}, "Keys"),
    h("ul", {}, SHORTCUTS.map(([keys, what]) => h("li", {}, h("kbd", {}, keys), ` ${what}`))),
    h("form", {method: "dialog"}, h("button", {onclick: (event) => { event.preventDefault(); $("help").close(); }}, "Close")));
}

async function route() {
  stop.abort();
  stop = new AbortController();
  view = {};
  say("");
  const mine = stop;
  try {
    const [name, ...args] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
    // A file holds one run, so it has no list.
    const only = from.kind === "file" && name !== "run";
    const shown = about.plan ? planView : only || (name === "run" && args[0]) ? runView : name === "compare" ? compareView : runsView;
    const context = {source: from, about, root: $("main"), signal: stop.signal, say, args: only ? [about.run] : args};
    const found = await shown(context);
    if (mine === stop) view = found || {};
  } catch (error) {
    if (error.name !== "AbortError" && mine === stop) { $("main").replaceChildren(); say(error.message); }
  }
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "?") $("help").showModal();
  else if (event.key === "/") { const box = document.querySelector("[data-filter]"); if (box) { box.focus(); event.preventDefault(); } }
  else view.key?.(event.key);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(remembered()));
window.addEventListener("hashchange", route);

try {
  [from, about] = await connect();
  header();
  help();
  await route();
} catch (error) {
  say(error.message);
}
