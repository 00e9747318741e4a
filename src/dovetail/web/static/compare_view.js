// Shows several runs on one axis. Runs that differ only in their seed are one line, with the range of their values as a band.

import {COLOURS, h, select, swap} from "./dom.js";
import {LineChart, Zoom} from "./line_chart.js";
import {axisOf, categorized, namesOf, points, STAGES} from "./metric_catalog.js";
import {hrefOf} from "./runs_view.js";
import {byStage} from "./source.js";

const FIRST = ["reward", "kl", "entropy", "response_length", "samples_per_second", "iteration_seconds"];

export async function compareView({source, root, signal, say, args}) {
  const runs = (await source.list(signal)).filter((run) => args.includes(run.id));
  if (runs.length < 2) { root.replaceChildren(h("p", {class: "mute"}, "Choose at least two runs in the list.")); return {}; }
  const histories = new Map(await Promise.all(runs.map(async (run) => [run.id, byStage(await source.history(run.id, signal))])));
  let grouped = true, by = "step", stage = ["ppo", "dpo", "reward", "sft"].find((name) => runs.some((run) => histories.get(run.id)[name])) || "ppo", more = "";
  const controls = h("div", {class: "bar"}), charts = h("div", {class: "charts"}), names = h("ul");
  root.replaceChildren(h("h2", {}, `Comparison of ${runs.length} runs`), names, controls, charts);

  function groups() {
    const found = new Map();
    for (const run of runs) {
      const key = grouped ? run.group : run.id;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(run);
    }
    return [...found.values()].map((members, i) => ({
      members, colour: COLOURS[i % COLOURS.length],
      label: members.length > 1 ? `${members[0].name}, ${members.length} seeds` : members[0].id,
    }));
  }
  function line(run, metric) {
    const steps = histories.get(run.id)[stage];
    if (!steps) return [];
    const begin = Math.min(...[...steps.values()].map((row) => row.time || Infinity));
    return points(steps, metric).map(([step, value]) => [by === "time" && Number.isFinite(begin) ? (steps.get(step).time - begin) / 60 : step, value]);
  }
  // The mean and the range of the seeds, at each step that all of them have.
  function mean(lines) {
    const values = new Map();
    for (const line of lines) for (const [x, y] of line) values.set(x, [...(values.get(x) || []), y]);
    return [...values].filter(([, ys]) => ys.length === lines.length).sort((a, b) => a[0] - b[0])
      .map(([x, ys]) => [x, ys.reduce((a, b) => a + b) / ys.length, Math.min(...ys), Math.max(...ys)]);
  }
  function draw() {
    const present = new Set(runs.flatMap((run) => [...namesOf(histories.get(run.id)[stage] || new Map())]));
    const all = categorized(present).flatMap(([, entries]) => entries.map(([name]) => name));
    const metrics = stage === "ppo" ? [...FIRST.filter((name) => present.has(name)), ...(more && !FIRST.includes(more) ? [more] : [])] : all.slice(0, 12);
    swap(controls, 
      select("Stage", Object.entries(STAGES).filter(([name]) => runs.some((run) => histories.get(run.id)[name])), stage, (value) => { stage = value; draw(); }),
      select("Axis", [["step", axisOf(stage)], ["time", "minutes since the stage began"]], by, (value) => { by = value; draw(); }),
      h("label", {}, h("input", {type: "checkbox", checked: grouped, onchange: (event) => { grouped = event.target.checked; draw(); }}), "seeds as one line"),
      stage === "ppo" ? select("Also", [["", "…"], ...all.map((name) => [name, name])], more, (value) => { more = value; draw(); }) : "");
    const zoom = new Zoom(), lines = groups();
    names.replaceChildren(...lines.map((one) => h("li", {}, h("b", {}, one.label), ": ", one.members.map((run, i) => [i ? ", " : "", h("a", {href: hrefOf(run.id, "overview")}, run.id)]))));
    charts.replaceChildren(...metrics.map((metric) => {
      const chart = new LineChart({title: metric, axis: by === "time" ? "minute" : axisOf(stage), zoom});
      chart.update(lines.flatMap((one) => {
        const each = one.members.map((run) => line(run, metric));
        if (each.length === 1) return [{label: one.label, colour: one.colour, points: each[0]}];
        const faint = each.map((part) => ({label: "", colour: one.colour, points: part, faint: true}));
        return by === "time" ? [{...faint[0], label: one.label, faint: false}, ...faint.slice(1)] : [{label: one.label, colour: one.colour, points: mean(each)}, ...faint];
      }));
      return chart.node;
    }));
  }
  draw();
  source.follow(null, async () => {
    try {
      for (const run of runs) histories.set(run.id, byStage(await source.history(run.id, signal)));
      if (!charts.contains(document.activeElement)) draw();
    } catch (error) { if (error.name !== "AbortError") say(error.message); }
  }, signal, say);
  return {};
}
