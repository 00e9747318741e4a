// A line chart. Drag, + and - zoom. A double click or Escape shows all. Arrow keys read values.

import {h, legend, number, s} from "./dom.js";

const H = 210, L = 50, R = 10, T = 8, B = 26;
const MOST = 600;

// The part of the x axis that several charts show.
export class Zoom {
  range = null;
  #listeners = new Set();
  listen(listener) { this.#listeners.add(listener); }
  set(range) {
    this.range = range;
    for (const listener of this.#listeners) listener();
  }
}

export function ticks(low, high, count) {
  const rough = (high - low) / count || 1, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * size).find((value) => value >= rough * 0.999);
  const begin = Math.ceil(low / step), found = [];
  // The count is limited: between numbers that differ only by rounding, adding a step changes nothing.
  for (let n = 0; n <= count + 1 && (begin + n) * step <= high + step * 1e-9; n++) found.push((begin + n) * step || 0);
  return found;
}

// Keeps at most MOST points: the lowest and the highest of each bucket.
function thinned(points) {
  if (points.length <= MOST) return points;
  const size = Math.ceil((2 * points.length) / MOST), found = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size);
    const ends = [part.reduce((a, b) => (b[1] < a[1] ? b : a)), part.reduce((a, b) => (b[1] > a[1] ? b : a))];
    found.push(...new Set(ends.sort((a, b) => a[0] - b[0])));
  }
  return found;
}

// `series`: [{label, colour, points: [[x, y, low, high]], faint, dots}] ; low and high make a band. `marks`: x values that are marked as bad.
export class LineChart {
  constructor({title, note = "", axis, zoom = new Zoom()}) {
    this.title = title;
    this.axis = axis;
    this.zoom = zoom;
    this.series = [];
    this.marks = [];
    this.at = null;
    this.svg = s("svg", {tabindex: 0, role: "img", "data-chart": title});
    this.read = h("output", {"aria-live": "polite"});
    this.names = h("div");
    this.node = h("figure", {hidden: true}, h("figcaption", {}, title, note && h("small", {}, note)), this.svg, this.names, this.read);
    this.svg.addEventListener("pointerdown", (event) => this.#grab(event));
    this.svg.addEventListener("pointermove", (event) => this.#hover(event));
    this.svg.addEventListener("pointerleave", () => this.#point(null));
    this.svg.addEventListener("dblclick", () => this.zoom.set(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    zoom.listen(() => this.draw());
    new ResizeObserver(() => { if (this.svg.clientWidth && this.svg.clientWidth !== this.width) this.draw(); }).observe(this.svg);
  }

  update(series, marks = []) {
    this.series = series.map((one) => ({...one, points: one.points.filter((point) => Number.isFinite(point[1])).sort((a, b) => a[0] - b[0])})).filter((one) => one.points.length);
    this.marks = marks;
    this.node.hidden = !this.series.length;
    this.draw();
  }

  draw() {
    if (!this.series.length) return;
    const W = this.width = Math.max(240, this.svg.clientWidth || 480);
    this.svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    const xs = this.series.flatMap((one) => [one.points[0][0], one.points[one.points.length - 1][0]]);
    this.all = [Math.min(...xs), Math.max(...xs)];
    const [first, last] = this.zoom.range || this.all;
    const shown = this.series.map((one) => {
      const inside = one.points.filter(([x]) => x >= first && x <= last);
      return {...one, points: thinned(inside)};
    });
    let low = Infinity, high = -Infinity;
    for (const one of shown) for (const [, y, under = y, over = y] of one.points) { low = Math.min(low, y, under); high = Math.max(high, y, over); }
    if (!(low <= high)) { low = 0; high = 1; }
    // The values are equal, or differ only by rounding.
    if (high - low <= 1e-12 * Math.abs(high)) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
    const room = (high - low) * 0.05;
    low -= room; high += room;
    const x = (value) => L + ((value - first) / (last - first || 1)) * (W - L - R);
    const y = (value) => H - B - ((value - low) / (high - low)) * (H - T - B);
    this.x = x;
    this.y = y;
    this.back = (place) => first + ((place - L) / (W - L - R)) * (last - first);
    const parts = [];
    for (const value of ticks(low, high, 5)) {
      parts.push(s("line", {class: "grid", x1: L, x2: W - R, y1: y(value), y2: y(value)}), s("text", {x: L - 5, y: y(value) + 4, "text-anchor": "end"}, number(value)));
    }
    for (const value of ticks(first, last, 5)) parts.push(s("text", {x: x(value), y: H - 8, "text-anchor": "middle"}, number(value, 4)));
    for (const mark of this.marks) if (mark >= first && mark <= last) parts.push(s("line", {class: "mark", x1: x(mark), x2: x(mark), y1: T, y2: H - B}));
    for (const one of shown) {
      const band = one.points.filter((point) => point.length > 3);
      if (band.length > 1) {
        const edge = [...band.map((p) => `${x(p[0]).toFixed(1)},${y(p[3]).toFixed(1)}`), ...band.reverse().map((p) => `${x(p[0]).toFixed(1)},${y(p[2]).toFixed(1)}`)];
        parts.push(s("path", {d: `M${edge.join("L")}Z`, fill: one.colour, "fill-opacity": 0.16}));
      }
      const way = one.points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join("L");
      if (!one.dots) parts.push(s("path", {d: `M${way}`, fill: "none", stroke: one.colour, "stroke-width": one.faint ? 1 : 1.8, "stroke-opacity": one.faint ? 0.4 : 1}));
      if (one.dots || (!one.faint && one.points.length <= 40)) for (const p of one.points) parts.push(s("circle", {cx: x(p[0]), cy: y(p[1]), r: one.dots ? 3 : 2, fill: one.colour, "fill-opacity": one.dots ? 0.55 : 1}));
    }
    this.cursor = s("g");
    this.select = s("rect", {class: "zoom", y: T, height: H - T - B, width: 0});
    this.svg.replaceChildren(...parts, this.select, this.cursor);
    const main = this.series.filter((one) => !one.faint);
    this.names.replaceChildren(main.length > 1 ? legend(main.map((one) => [one.label, one.colour])) : "");
    const ends = main.map((one) => `${one.label} ${number(one.points[one.points.length - 1][1], 4)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${ends} at ${this.axis} ${number(this.all[1], 6)}`);
    this.#point(this.at);
  }

  #place(event) {
    const box = this.svg.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * this.width;
  }

  #grab(event) {
    if (event.button !== 0 || !this.series.length) return;
    const start = this.#place(event);
    this.svg.setPointerCapture(event.pointerId);
    const move = (next) => {
      const ends = [start, this.#place(next)].sort((a, b) => a - b);
      this.select.setAttribute("x", ends[0]);
      this.select.setAttribute("width", ends[1] - ends[0]);
    };
    const end = (next) => {
      this.svg.removeEventListener("pointermove", move);
      this.select.setAttribute("width", 0);
      const ends = [start, this.#place(next)].sort((a, b) => a - b);
      if (next.type === "pointerup" && ends[1] - ends[0] > 8) this.#show(this.back(ends[0]), this.back(ends[1]));
    };
    this.svg.addEventListener("pointermove", move);
    this.svg.addEventListener("pointerup", end, {once: true});
    this.svg.addEventListener("pointercancel", end, {once: true});
  }

  #show(first, last) {
    const range = [Math.max(this.all[0], first), Math.min(this.all[1], last)];
    this.zoom.set(range[1] > range[0] && (range[0] > this.all[0] || range[1] < this.all[1]) ? range : null);
  }

  #steps() { return [...new Set(this.series.flatMap((one) => one.points.map((p) => p[0])))].sort((a, b) => a - b); }

  #hover(event) {
    if (!this.series.length) return;
    const value = this.back(this.#place(event));
    this.#point(this.#steps().reduce((a, b) => (Math.abs(b - value) < Math.abs(a - value) ? b : a)));
  }

  #point(step) {
    this.at = step;
    if (!this.cursor) return;
    if (step === null) { this.cursor.replaceChildren(); this.read.textContent = ""; return; }
    const values = this.series.flatMap((one) => one.points.filter((p) => p[0] === step).map((p) => [one, p]));
    this.cursor.replaceChildren(s("line", {class: "cursor", x1: this.x(step), x2: this.x(step), y1: T, y2: H - B}),
      ...values.map(([one, p]) => s("circle", {cx: this.x(step), cy: this.y(p[1]), r: 4, fill: one.colour})));
    const told = values.map(([one, p]) => `${one.label} ${number(p[1], 4)}${p.length > 3 ? ` (${number(p[2])} to ${number(p[3])})` : ""}`);
    this.read.textContent = `${this.axis} ${number(step, 6)}: ${told.join(", ")}`;
  }

  #key(event) {
    if (!this.series.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const [first, last] = this.zoom.range || this.all, steps = this.#steps().filter((step) => step >= first && step <= last);
    const place = steps.indexOf(this.at), middle = this.at === null ? (first + last) / 2 : this.at, width = last - first;
    if (event.key === "ArrowRight") this.#point(steps[Math.min(steps.length - 1, place + 1)]);
    else if (event.key === "ArrowLeft") this.#point(steps[place < 0 ? steps.length - 1 : Math.max(0, place - 1)]);
    else if (event.key === "+" || event.key === "=") this.#show(middle - width / 4, middle + width / 4);
    else if (event.key === "-") this.#show(middle - width, middle + width);
    else if (event.key === "Escape" || event.key === "0") this.zoom.set(null);
    else return;
    event.preventDefault();
  }
}
