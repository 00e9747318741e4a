// Shows the schedule of training as it was planned, beside serial 1F1B, and as it was run.

import {ACTION_NAMES, ACTIONS, h, legend, number, percent, select, swap, table} from "./dom.js";
import {lanes} from "./lanes.js";

export async function scheduleTab({source, id, body, signal}) {
  const seen = await source.document(id, "overview", signal);
  if (!seen.has_schedule) {
    body.replaceChildren(h("p", {class: "mute"}, "This run has only one possible schedule of training: its trainers have no pipeline stages, or PPO has not begun."));
    return {};
  }
  const there = seen.trace_iterations.filter((n) => source.has(`schedule/${n}`));
  let iteration = there[there.length - 1] || 0;
  const controls = h("div", {class: "bar"}), box = h("div");
  body.replaceChildren(controls, box);
  async function load() {
    const found = await source.document(id, `schedule/${iteration}`, signal);
    const unit = found.in_seconds ? "s" : "units", parts = [["Serial 1F1B, as drawn", found.serial], [`${found.chosen}, as drawn`, found.drawn]];
    if (found.run) parts.push([`${found.chosen}, as run in iteration ${iteration}`, found.run]);
    const end = Math.max(...parts.map(([, part]) => part.seconds));
    const used = new Set(parts.flatMap(([, part]) => part.ranks.flat().map((action) => `${action.model} ${action.kind}`)));
    const models = [...new Set([...used].map((name) => name.slice(0, -2)))].sort().join(" and ");
    swap(controls, select("As run in iteration", [...there].reverse().map((n) => [n, n]), iteration, (value) => { iteration = Number(value); load(); }));
    box.replaceChildren(
      h("p", {}, `${found.chosen}: ${number(found.drawn.seconds)} ${unit} for ${found.mini_batches} ${found.mini_batches === 1 ? "mini-batch" : "mini-batches"} of ${models}, where serial 1F1B takes ${number(found.serial.seconds)} ${unit} (${number(found.speedup)} times as fast).`,
        found.run ? ` As it was run it took ${number(found.run.seconds)} s, ${percent(Math.abs(found.run.seconds / found.drawn.seconds - 1))} ${found.run.seconds > found.drawn.seconds ? "longer" : "less"} than drawn.` : ""),
      legend([...used].sort().map((name) => [`${name.slice(0, -2)} ${ACTION_NAMES[name.slice(-1)]}`, ACTIONS[name]])),
      ...parts.map(([title, part]) => lanes({title: `${title}: ${number(part.seconds)} ${unit}`, end, unit, lanes: part.ranks.map((rank, i) => ({label: `rank ${i}`,
        bars: rank.map((a) => [`${a.model} ${ACTION_NAMES[a.kind]} ${a.micro_batch}`, a.start, a.end, a.stage === null ? "" : `stage ${a.stage}`, ACTIONS[`${a.model} ${a.kind}`]])}))})),
      h("details", {}, h("summary", {}, "Times and memory"), table([{label: "What"}, {label: "Value", n: true}], found.facts || [], "Times and memory")),
      h("details", {}, h("summary", {}, "Other families"), table([{label: "Family"}, {label: "Published as"}, {label: "Longer by", n: true}, {label: "Peak activation", n: true}, {label: "Here"}],
        [...found.families.map((f) => [`${f.name}: ${f.description}`, f.published, percent(f.slower), f.peak, f.name === found.chosen ? "chosen" : f.runs_here ? "possible" : "not with this layout"]), ...Object.entries(found.refused).map(([name, why]) => [name, "", "–", "–", why])], "Families")));
  }
  await load();
  return {key: (key) => { const next = there[there.indexOf(iteration) + (key === "j" ? 1 : key === "k" ? -1 : NaN)]; if (next !== undefined) { iteration = next; load(); } }};
}
