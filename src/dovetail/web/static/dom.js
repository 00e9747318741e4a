// Makes elements and writes numbers. All text becomes text nodes, so nothing that a model wrote is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "colour") node.style.backgroundColor = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  return Number(value).toLocaleString("en", {maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(Math.abs(value) + 1)))});
}

// As the terminal and the report write it.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60), two = (value) => String(value).padStart(2, "0");
  return minutes < 60 ? `${minutes} min ${two(whole % 60)} s` : `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

export const moment = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "–");
export const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));
export const percent = (value) => (value === null || value === undefined ? "–" : `${number(100 * value, 3)}%`);

// A table. `columns`: {label, n: whether it has numbers}. A row is a list of cells. On a narrow screen each row becomes a card.
export function table(columns, rows, caption = "") {
  const head = columns.map((column) => h("th", {class: column.n ? "n" : null, scope: "col"}, column.head || column.label));
  const body = rows.map((row) => h("tr", {}, row.map((cell, i) =>
    h("td", {class: columns[i].n ? "n" : null, "data-label": columns[i].label || null}, cell === null || cell === undefined ? "–" : cell))));
  return h("table", {class: "cards", "aria-label": caption || null}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
}

export function select(label, options, chosen, onchange) {
  const box = h("select", {onchange: () => onchange(box.value)},
    options.map(([value, text]) => h("option", {value, selected: String(value) === String(chosen)}, text)));
  return h("label", {}, label, box);
}

const FOCUSED = "a,button,input,select,[tabindex]";
const nameOf = (node) => `${node.tagName} ${node.getAttribute("aria-label") || node.closest("label")?.firstChild?.textContent || node.textContent}`;

// Replaces the content of a box. The keyboard's focus stays on the element with the same name.
export function swap(box, ...children) {
  const active = box.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  box.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  if (active) [...box.querySelectorAll(FOCUSED)].find((node) => nameOf(node) === active)?.focus();
}

export const legend = (entries) => h("div", {class: "legend"}, entries.map(([name, colour]) =>
  h("span", {}, s("svg", {viewBox: "0 0 10 10", "aria-hidden": "true"}, s("rect", {width: 10, height: 10, rx: 2, fill: colour})), name)));

export const COLOURS = ["#3b82c4", "#c9761a", "#3f9a5a", "#b3568f", "#7a63c9", "#a58a1d", "#2a9d9d", "#b3564a"];
export const PHASES = {
  generation: "#3b82c4", inference: "#c98a1b", waiting: "#9aa0a8", training: "#3f9a5a", weights: "#8a5cc2", checkpoint: "#b3564a",
  evaluation: "#2a9d9d", overlap: "#8b93a0", other: "#8b93a0", migration: "#c2487e",
};
// What the bars of one colour have in common.
export function kindOf(name) {
  const action = /^(actor|critic) ?([FBIW])/.exec(name);
  return action ? `${action[1]} ${ACTION_NAMES[action[2]]}` : name.replace(/[0-9/-]+/g, "").trim();
}
export function colourOf(name) {
  if (PHASES[name]) return PHASES[name];
  const action = /^(actor|critic) ?([FBIW])/.exec(name);
  if (action) return ACTIONS[`${action[1]} ${action[2]}`];
  let hash = 0;
  for (const letter of name.replace(/[0-9/-]+/g, "")) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
  return COLOURS[hash % COLOURS.length];
}
export const ACTIONS = {
  "actor F": "#5b9bd8", "actor B": "#2b62a0", "actor I": "#3f7fc0", "actor W": "#1c4878",
  "critic F": "#e0a24e", "critic B": "#b06a10", "critic I": "#c98425", "critic W": "#7d4a06",
  "reward F": "#7fb77e", "reward B": "#3f7f4a", "reward I": "#5a9b63", "reward W": "#27552f",
};
export const ACTION_NAMES = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"};
