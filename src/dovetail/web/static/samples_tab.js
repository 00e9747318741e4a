// Shows the samples of an iteration or of an evaluation in a chart, and in a table that can be sorted and filtered.

import {h, number, select, swap, table} from "./dom.js";
import {LineChart} from "./line_chart.js";
import {hrefOf} from "./runs_view.js";

const SHOWN = 100, SIDE = "side";
const COLUMNS = [["asked", "Prompt", false], ["answer", "Response", false], ["reward", "Reward", true], ["tokens", "Tokens", true], ["kl", "KL", true], ["staleness", "Staleness", true], ["server", "Server", false], ["migrations", "Moves", true]];

export async function samplesTab({source, id, body, args, signal}) {
  let kind = args[0] === "evaluation" ? "evaluation" : "samples", number_ = args[0] === "evaluation" ? args[1] : args[0];
  let order = "", rising = false, most = SHOWN, page = null, sides = [], kept = {sample_iterations: [], evaluations: []}, follow = !number_;
  const controls = h("div", {class: "bar"}), notes = h("div"), list = h("div");
  const filter = h("input", {type: "search", placeholder: "text in prompt or response", "data-filter": true, "aria-label": "Filter samples", oninput: () => draw()});
  const picture = new LineChart({title: "Reward by response length", axis: "tokens"});
  body.replaceChildren(controls, notes, h("details", {}, h("summary", {}, "Picture"), picture.node), list);

  const moment = (n) => (n > 0 ? `after iteration ${n}` : n ? "before SFT" : `before ${kept.method || "PPO"}`);
  async function load() {
    kept = await source.document(id, "overview", signal);
    const there = kind === "samples" ? kept.sample_iterations : kept.evaluations;
    if (follow || !number_) number_ = there.length ? there[there.length - 1] : null;
    if (number_ === null && kind === "samples" && kept.evaluations.length) { kind = "evaluation"; number_ = kept.evaluations[kept.evaluations.length - 1]; }
    if (kind === "evaluation" && number_ === SIDE) { head(); await sideBySide(); return; }
    if (number_ === null) { controls.replaceChildren(); list.replaceChildren(h("p", {class: "mute"}, "No samples are kept yet: they come when the first iteration has been drawn and scored.")); return; }
    page = await source.document(id, `${kind}/${number_}`, signal);
    head();
    draw();
  }
  function head() {
    const options = [...kept.sample_iterations.map((n) => [`samples/${n}`, `iteration ${n}`]).reverse(), ...kept.evaluations.map((n) => [`evaluation/${n}`, `evaluation ${moment(n)}`]).reverse()];
    if (kept.evaluations.length > 1) options.push([`evaluation/${SIDE}`, "evaluations side by side"]);
    swap(controls, select("Samples of", options, `${kind}/${number_}`, (value) => {
      [kind, number_] = value.split("/");
      follow = false;
      load();
    }), filter);
  }
  // The answers to the same prompts before SFT, before PPO and at the last evaluation, side by side.
  async function sideBySide() {
    const all = kept.evaluations, shown = [...new Set([...all.filter((n) => n <= 0), all[all.length - 1]])];
    sides = await Promise.all(shown.map((n) => source.document(id, `evaluation/${n}`, signal)));
    page = null;
    drawSides();
  }
  function drawSides() {
    const wanted = filter.value.toLowerCase(), place = (row) => `${row.prompt}/${row.sample}`;
    const found = sides.map((side) => new Map(side.rows.map((row) => [place(row), row])));
    const rows = sides[0].rows.filter((row) => found.every((side) => side.has(place(row)))).map((row) => found.map((side) => side.get(place(row))))
      .filter((row) => !wanted || row.some((one) => `${one.asked} ${one.answer}`.toLowerCase().includes(wanted)));
    const columns = [{label: "Prompt"}, ...sides.map((side) => ({label: `Answer ${moment(side.iteration)}`}))];
    const cell = (row) => h("span", {}, row.answer || "(empty)", h("span", {class: "mute"}, ` ${Object.entries(row.rewards).map(([name, value]) => `${name} ${number(value)}`).join(", ")}`));
    swap(notes, h("p", {class: "mute"}, `${rows.length} prompts that are kept for evaluation, with the answers of ${sides.length} versions of the model.`));
    swap(list, table(columns, rows.slice(0, most).map((row) => [row[0].asked, ...row.map(cell)]), "Answers side by side"), rows.length > most ? h("button", {type: "button", onclick: () => { most += 5 * SHOWN; drawSides(); }}, `Show more of ${rows.length}`) : "");
    picture.update([]);
  }
  function draw() {
    if (number_ === SIDE && kind === "evaluation") { if (sides.length) drawSides(); return; }
    if (!page) return;
    const wanted = filter.value.toLowerCase();
    let rows = page.rows.filter((row) => !wanted || row.asked.toLowerCase().includes(wanted) || row.answer.toLowerCase().includes(wanted));
    if (order) rows = [...rows].sort((a, b) => ((a[order] ?? -Infinity) > (b[order] ?? -Infinity) ? 1 : -1) * (rising ? 1 : -1));
    const moved = page.rows.filter((row) => row.migrations).length;
    swap(notes, page.equal_groups ? h("div", {class: page.equal_groups >= 0.75 * page.groups ? "note bad" : "note"}, `All rewards of ${page.equal_groups} of ${page.groups} groups are equal: nothing is learnt from these.`) : "",
      h("p", {class: "mute"}, `${page.rows.length + page.left_out} samples, ${page.rows.filter((row) => row.cut).length} cut at the limit, ${moved} moved to another server.${page.left_out ? ` The first ${page.rows.length} are here; dovetail samples shows all.` : ""}`));
    const columns = COLUMNS.filter(([key]) => kind === "samples" || !["kl", "staleness", "server", "migrations"].includes(key)).map(([key, label, n]) => ({key, label, n, head: n
      ? h("button", {class: "plain", type: "button", "aria-label": `Sort by ${label}`, onclick: () => { rising = order === key ? !rising : false; order = key; draw(); }}, label, order === key ? (rising ? " ▲" : " ▼") : "")
      : label}));
    const cells = (row) => columns.map(({key, n}) => {
      if (key === "asked") return kind === "samples" && source.has(`sample/${number_}/${row.prompt}/${row.sample}`) ? h("a", {href: hrefOf(id, "sample", number_, row.prompt, row.sample)}, row.asked || "(empty)") : row.asked || "(empty)";
      if (key === "reward") return h("span", {title: Object.entries(row.rewards).map(([name, value]) => `${name} ${number(value)}`).join(", ")}, number(row.reward ?? Object.values(row.rewards)[0]), row.equal_group ? " =" : "");
      if (key === "tokens") return `${row.tokens ?? "–"}${row.cut ? " (cut)" : ""}`;
      if (key === "migrations") return row.retries ? `${row.migrations} (${row.retries} failed)` : row.migrations;
      return n ? number(row[key]) : row[key] || (key === "answer" ? "(empty)" : "–");
    });
    swap(list, table(columns, rows.slice(0, most).map(cells), "Samples"), rows.length > most ? h("button", {type: "button", onclick: () => { most += 5 * SHOWN; draw(); }}, `Show more of ${rows.length}`) : "");
    picture.update([["ended", "#3b82c4", false], ["cut", "#b3564a", true]].map(([label, colour, cut]) => ({label, colour, dots: true, points: rows.filter((row) => row.cut === cut && row.reward !== null).map((row) => [row.tokens, row.reward])})));
  }
  await load();
  return {
    refresh: async () => { if (follow && document.activeElement?.tagName !== "SELECT" && !list.contains(document.activeElement)) await load(); },
    key: (key) => {
      const there = kind === "samples" ? kept.sample_iterations : kept.evaluations, place = there.indexOf(Number(number_));
      const next = there[place + (key === "j" ? 1 : key === "k" ? -1 : NaN)];
      if (next !== undefined) { number_ = next; follow = false; load(); }
    },
  };
}
