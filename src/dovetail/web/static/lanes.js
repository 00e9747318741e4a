// Shows bars on lanes over time: an iteration's timeline, or a schedule by rank. It zooms as line charts do. Arrow keys choose a bar.

import {colourOf, duration, h, legend, number, percent, s} from "./dom.js";
import {ticks} from "./line_chart.js";

const BAR = 15, LABEL = 14, GAP = 4, AXIS = 18;

// `lanes`: [{label, bars: [[name, start, end, detail, colour?]]}]. `end`: the end of the axis, so that several charts can have one scale.
export function lanes({title, note = "", lanes: given, end = 0, unit = "s"}) {
  const whole = Math.max(end, ...given.flatMap((lane) => lane.bars.map((bar) => bar[2])), 1e-9);
  let [first, last] = [0, whole], chosen = null, W = 1000;
  const height = given.length * (LABEL + BAR + GAP) + AXIS;
  const svg = s("svg", {tabindex: 0, role: "img", "aria-label": `${title}, ${given.length} lanes`, "data-lanes": title});
  const read = h("output", {"aria-live": "polite"});
  const x = (time) => ((time - first) / (last - first)) * W;
  const tell = ([name, start, stop, detail]) => unit === "s"
    ? `${name}: ${duration(stop - start)}, from ${number(start, 4)} s${detail ? `; ${detail}` : ""}`
    : `${name}: ${number(stop - start)} ${unit}, from ${number(start, 4)}${detail ? `; ${detail}` : ""}`;

  function draw() {
    const parts = [];
    W = Math.max(300, svg.clientWidth || 1000);
    svg.setAttribute("viewBox", `0 0 ${W} ${height}`);
    for (const value of ticks(first, last, W / 110)) {
      const place = x(value);
      parts.push(s("line", {class: "grid", x1: place, x2: place, y1: 0, y2: height - AXIS}));
      parts.push(s("text", {x: place, y: height - 5, "text-anchor": place < 20 ? "start" : place > W - 30 ? "end" : "middle"}, `${number(value, 4)} ${unit}`));
    }
    given.forEach((lane, row) => {
      const top = row * (LABEL + BAR + GAP);
      parts.push(s("text", {x: 0, y: top + 11}, lane.label));
      lane.bars.forEach((bar, index) => {
        const [name, start, stop, , colour] = bar;
        if (stop < first || start > last) return;
        const from = Math.max(0, x(start)), to = Math.min(W, x(stop));
        parts.push(s("rect", {
          x: from, y: top + LABEL, width: Math.max(0.6, to - from), height: BAR, fill: colour || colourOf(name), rx: 1,
          class: chosen && chosen[0] === row && chosen[1] === index ? "chosen" : null, "data-at": `${row} ${index}`,
        }, s("title", {}, tell(bar))));
      });
    });
    svg.replaceChildren(...parts);
  }
  function choose(row, index) {
    const bars = given[row]?.bars;
    if (!bars?.length) return;
    chosen = [row, Math.max(0, Math.min(bars.length - 1, index))];
    const bar = bars[chosen[1]];
    if (bar[1] < first || bar[2] > last) {
      const width = last - first;
      first = Math.max(0, Math.min(whole - width, bar[1] - width / 2));
      last = first + width;
    }
    read.textContent = `${given[row].label}: ${tell(bar)}`;
    draw();
  }
  function show(from, to) {
    first = Math.max(0, from);
    last = Math.min(whole, to);
    if (last - first < whole * 1e-5) [first, last] = [0, whole];
    draw();
  }
  const time = (event) => {
    const box = svg.getBoundingClientRect();
    return first + ((event.clientX - box.left) / box.width) * (last - first);
  };
  let grabbed = null;
  svg.addEventListener("pointerdown", (event) => { if (event.button === 0) grabbed = [time(event), event.clientX]; });
  svg.addEventListener("pointerup", (event) => {
    if (grabbed && Math.abs(event.clientX - grabbed[1]) > 6) show(Math.min(grabbed[0], time(event)), Math.max(grabbed[0], time(event)));
    else if (event.target.dataset?.at) choose(...event.target.dataset.at.split(" ").map(Number));
    grabbed = null;
  });
  svg.addEventListener("dblclick", () => show(0, whole));
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [row, index] = chosen || [0, -1], width = last - first;
    const bar = chosen && given[row].bars[index], middle = bar ? (bar[1] + bar[2]) / 2 : (first + last) / 2;
    if (event.key === "ArrowRight") choose(row, index + 1);
    else if (event.key === "ArrowLeft") choose(row, index - 1);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const next = Math.max(0, Math.min(given.length - 1, row + (event.key === "ArrowDown" ? (chosen ? 1 : 0) : -1)));
      const near = given[next].bars.findIndex((other) => other[2] >= (bar ? bar[1] : 0));
      choose(next, near < 0 ? given[next].bars.length - 1 : near);
    } else if (event.key === "+" || event.key === "=") show(middle - width / 4, middle + width / 4);
    else if (event.key === "-") show(middle - width, middle + width);
    else if (event.key === "Escape" || event.key === "0") show(0, whole);
    else return;
    event.preventDefault();
  });
  draw();
  new ResizeObserver(() => { if (svg.clientWidth && svg.clientWidth !== W) draw(); }).observe(svg);
  return h("figure", {class: "wide"}, h("figcaption", {}, title, note && h("small", {}, note)), svg, read);
}

// One bar of parts, and their shares. `parts`: [[name, seconds]].
export function shares(title, parts) {
  const whole = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!whole) return [];
  let end = 0;
  const bars = parts.map(([name, seconds]) => [name, end, end += seconds, percent(seconds / whole)]);
  return [lanes({title, lanes: [{label: "", bars}]}), legend(parts.map(([name, seconds]) => [`${name} ${duration(seconds)} (${percent(seconds / whole)})`, colourOf(name)]))];
}
