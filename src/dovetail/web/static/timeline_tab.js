// Shows an iteration's timeline with every process, and the planned times beside the measured ones.

import {colourOf, h, kindOf, legend, select, swap} from "./dom.js";
import {lanes} from "./lanes.js";
import {LineChart} from "./line_chart.js";
import {planTable} from "./overview_tab.js";

// The legend names this many kinds of bars, those that take the longest.
const KINDS = 16;

export async function timelineTab({source, id, body, args, signal}) {
  let iteration = args[0] ? Number(args[0]) : null, follow = iteration === null, there = [], shown = null;
  const controls = h("div", {class: "bar"}), box = h("div");
  body.replaceChildren(controls, box);
  async function load() {
    there = (await source.document(id, "overview", signal)).trace_iterations;
    if (follow) iteration = there.length ? there[there.length - 1] : null;
    if (iteration === null) { box.replaceChildren(h("p", {class: "mute"}, source.kind === "file" ? "This file has no timeline." : "No iteration has ended yet.")); return; }
    swap(controls, select("Iteration", [...there].reverse().map((n) => [n, n]), iteration, (value) => { iteration = Number(value); follow = false; load(); }),
      h("span", {class: "mute"}, "Drag to zoom. Arrow keys choose a bar."));
    if (iteration === shown) return;
    const found = await source.document(id, `timeline/${iteration}`, signal);
    shown = iteration;
    const left = new LineChart({title: "Samples still to generate", axis: "second"});
    left.update(Object.entries(found.curves).map(([name, points]) => ({label: name, colour: "#3b82c4", points})));
    const kinds = new Map();
    for (const [name, start, end] of found.lanes.flatMap((lane) => lane.bars)) {
      const kind = kindOf(name), known = kinds.get(kind) || [0, colourOf(name)];
      kinds.set(kind, [known[0] + end - start, known[1]]);
    }
    const longest = [...kinds].sort((a, b) => b[1][0] - a[1][0]).slice(0, KINDS);
    box.replaceChildren(...[planTable(found.plan, true)].flat(), legend(longest.map(([kind, [, colour]]) => [kind, colour])), lanes({title: `Timeline of iteration ${iteration}`, note: found.left_out ? `The ${found.left_out} shortest bars are left out.` : "",
      lanes: found.lanes.map((lane) => ({label: lane.lane === "main" ? lane.process : `${lane.process} / ${lane.lane}`, bars: lane.bars}))}), left.node);
  }
  await load();
  return {
    refresh: async () => { if (follow && !box.contains(document.activeElement)) await load(); },
    key: (key) => { const next = there[there.indexOf(iteration) + (key === "j" ? 1 : key === "k" ? -1 : NaN)]; if (next !== undefined) { iteration = next; follow = false; load(); } },
  };
}
