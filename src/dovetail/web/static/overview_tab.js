// Shows how the run is doing. Verdicts come first, or else advice. Progress, planned and measured times, and results follow.

import {duration, h, moment, number, percent, swap, table} from "./dom.js";
import {shares} from "./lanes.js";
import {LineChart} from "./line_chart.js";
import {points} from "./metric_catalog.js";
import {stageOf, stateMark} from "./runs_view.js";
import {byStage} from "./source.js";

const PROBLEM_CODES = [404, 502, 503];

// The overview from the run's own documents. If a job's coordinator cannot be asked, it is made from the job's status.
export async function overviewOf(source, id, signal) {
  if (source.kind !== "cluster") {
    const seen = await source.document(id, "overview", signal), live = seen.state === "running" ? await source.live(id, signal) : null;
    return {...seen, live, seconds_left: live?.seconds_left ?? live?.stage_seconds_left ?? seen.seconds_left};
  }
  const [job, document] = await Promise.all([source.job(id, signal),
    source.document(id, "overview", signal).catch((error) => { if (PROBLEM_CODES.includes(error.code)) return {problem: error.message}; throw error; })]);
  const live = job.live?.status || {};
  return {
    ...document, job, id, state: job.state, stage: job.stage ?? document.stage, done: job.iteration ?? document.done, total: job.iterations ?? document.total,
    reward: job.reward ?? document.reward, kl: job.kl ?? document.kl, samples_per_second: job.samplesPerSecond ?? document.samples_per_second,
    seconds_left: live.seconds_left ?? live.stage_seconds_left ?? document.seconds_left, method: live.method || document.method, live: job.live?.reachable ? live : null,
    reason: whyNot(job) || document.reason || "", health: document.health || healthOf(job),
  };
}

// The sentence of the condition that says why a job does not run, or why it failed.
export function whyNot(job) {
  const held = (type, status = "True") => job.conditions.find((c) => c.type === type && c.status === status);
  const said = held("Failed") || held("Suspended") || (["Running", "Completed"].includes(job.state) ? held("Degraded") : held("Scheduled", "False") || held("Planned", "False") || held("Running", "False"));
  return said ? `${said.reason}: ${said.message}` : "";
}

// A sentence on why a job's own documents are not available now. `problem`: the answer to the request for them.
export function absent(job, problem) {
  if (["Completed", "Failed"].includes(job.state)) return "The job is over, and its coordinator is gone. The operator kept its last rows of metrics; dovetail ui shows everything from the job's volume.";
  return whyNot(job) ? "It is shown as soon as the job runs." : `${problem}.`;
}

function healthOf(job) {
  const unwell = job.conditions.find((c) => c.type === "Healthy" && c.status === "False");
  return {iteration: job.iteration, verdicts: unwell ? [{reason: unwell.reason, message: unwell.message}] : [], earlier: [], unhealthy: [], advice: []};
}

export function healthPanel(health) {
  if (health.verdicts.length) {
    return health.verdicts.map((verdict) => h("div", {class: "note bad", role: "alert"}, h("b", {}, verdict.reason), verdict.message, "."));
  }
  if (health.iteration === null || health.iteration === undefined) return [];
  return [h("div", {class: "note good"}, h("b", {}, "Healthy"), health.unhealthy.length ? `in iteration ${health.iteration}.` : `in all ${health.iteration} iterations.`),
    health.advice.length ? h("div", {class: "note"}, h("b", {}, "Could be better"), h("ul", {}, health.advice.map((sentence) => h("li", {}, sentence)))) : ""];
}

function earlier(health) {
  if (!health.earlier.length) return "";
  return h("details", {}, h("summary", {}, `What was wrong earlier (${health.earlier.length})`), table([{label: "Verdict"}, {label: "First", n: true}, {label: "Last", n: true}, {label: "Iterations", n: true}, {label: "What it said"}],
    health.earlier.map((known) => [known.reason, known.first, known.last, known.count, known.message]), "Earlier verdicts"));
}

// `single`: show one iteration, and no mean of the last ten.
export function planTable(plan, single = false) {
  if (!plan.length) return "";
  const measured = single ? [{label: "Measured, s", n: true}] : [{label: "Last, s", n: true}, {label: "Mean of the last ten, s", n: true}];
  const off = ({planned, mean}) => (planned && mean !== null ? mean / planned - 1 : null);
  const taken = (row) => [number(row.last), ...(single ? [] : [number(row.mean)])];
  // A plan may predict all phases, some or none.
  const planned = plan.filter((row) => row.planned !== null), rest = plan.filter((row) => row.planned === null);
  return [...(planned.length ? [h("h3", {}, "Plan against actual"), table([{label: "Phase"}, {label: "Planned, s", n: true}, ...measured, {label: "Difference", n: true}],
    planned.map((row) => [row.phase, number(row.planned), ...taken(row),
      off(row) === null ? "–" : h("span", {class: Math.abs(off(row)) > 0.25 ? "warn" : ""}, `${off(row) > 0 ? "+" : ""}${percent(off(row))}`)]), "Plan against actual")] : []),
  ...(rest.length ? [h("h3", {}, "Time of each phase"), table([{label: "Phase"}, ...measured], rest.map((row) => [row.phase, ...taken(row)]), "Plan against actual: phases without a plan")] : [])];
}

// What the GPUs did, why they waited, and what that cost.
function billTable(bill) {
  if (!bill?.parts?.length) return [];
  const total = bill.seconds * bill.gpus, unit = `${bill.unit} seconds`, priced = bill.price !== null;
  const line = (name, seconds) => [name, number(seconds), percent(seconds / total), ...(priced ? [number(bill.price * seconds / total)] : [])];
  const rows = [[true, "work"], [false, "idle"]].flatMap(([works, title]) => {
    const mine = bill.parts.filter((part) => part[2] === works);
    return [line(h("b", {}, title), mine.reduce((sum, part) => sum + part[1], 0)), ...mine.map(([name, seconds]) => line(name, seconds))];
  });
  return [h("h3", {}, "Bill"), ...bill.sentences.map((sentence) => h("p", {}, sentence)),
    table([{label: "What"}, {label: unit, n: true}, {label: "Share", n: true}, ...(priced ? [{label: "Price", n: true}] : [])], rows, "Bill"),
    h("details", {}, h("summary", {}, "By iteration"), table([{label: "Iteration", n: true}, {label: unit, n: true}, {label: `${unit} of a sample`, n: true}, {label: "Worked", n: true}, ...(priced ? [{label: "Price", n: true}] : []), {label: "Most of the idle time"}],
      bill.iterations.map((one) => {
        const works = new Set(bill.parts.filter((part) => part[2]).map(([name]) => name)), parts = Object.entries(one.parts);
        const busy = parts.reduce((sum, [name, seconds]) => sum + (works.has(name) ? seconds : 0), 0);
        const most = parts.filter(([name]) => !works.has(name)).sort((a, b) => b[1] - a[1])[0];
        return [one.iteration, number(one.gpu_seconds), one.samples ? number(one.gpu_seconds / one.samples) : "–", percent(busy / one.gpu_seconds), ...(priced ? [number(one.price)] : []), most ? `${most[0]}: ${number(most[1])}` : "–"];
      }), "Bill by iteration"))];
}

// The step in progress, and the servers that are not healthy.
function now(live) {
  if (!live) return "";
  const drawn = live.phase === "generation" && live.samples_total ? `, ${live.samples_done} of ${live.samples_total} samples` : "";
  const step = live.stage ? `${live.stage === "ppo" ? `iteration ${live.iteration}` : `${live.stage} step ${live.step}`}${live.phase ? `: ${live.phase}${drawn}` : ""}` : live.message;
  const unwell = Object.entries(live.instances || {}).filter(([, instance]) => instance.state !== "healthy");
  const held = Object.entries(live.buffered || {}).filter(([, size]) => size >= 1e6).map(([holder, size]) => `${holder} ${Math.round(size / 1e6)} MB`);
  const stalled = (live.health?.verdicts || []).filter((verdict) => verdict.reason === "Stalled");
  return [...stalled.map((verdict) => h("div", {class: "note bad", role: "alert"}, h("b", {}, verdict.reason), verdict.message, ".")), step ? h("p", {class: "live"}, step) : "", held.length ? h("p", {}, `In the coordinator's memory: ${held.join(", ")}`) : "", unwell.length ? h("details", {}, h("summary", {}, `${unwell.length} of ${Object.keys(live.instances).length} servers are not healthy`),
    h("ul", {}, unwell.map(([name, instance]) => h("li", {}, h("b", {}, name), ` ${instance.state}${instance.reason ? `: ${instance.reason}` : ""}`)))) : ""];
}

const LIVE_SECONDS = 3;

export async function overviewTab({source, id, body, signal}) {
  const top = h("div"), present = h("div"), figures = h("div", {class: "charts"}), rest = h("div");
  body.replaceChildren(top, present, figures, rest);
  const charts = new Map();
  function chart(title, axis, metric, steps, marks = []) {
    if (!charts.has(title)) {
      charts.set(title, new LineChart({title, axis}));
      figures.append(charts.get(title).node);
    }
    charts.get(title).update([{label: metric, colour: "#3b82c4", points: points(steps, metric)}], marks);
  }

  async function refresh() {
    const seen = await overviewOf(source, id, signal), bill = await source.document(id, "bill", signal).catch(() => null);
    const stages = byStage(await source.history(id, signal));
    const fact = (name, value) => h("div", {class: "card"}, h("span", {}, name), h("b", {}, value));
    swap(top, seen.reason ? h("div", {class: /fail|stop/i.test(seen.state) ? "note bad" : "note warn"}, h("b", {}, seen.state), seen.reason) : "",
      seen.outcome ? h("div", {class: "note"}, h("b", {}, "Result"), seen.outcome) : "",
      seen.audit?.sentence ? h("div", {class: seen.audit.problems.length ? "note bad" : "note good"}, h("b", {}, "Audit"), seen.audit.sentence) : "", ...healthPanel(seen.health).flat(),
      seen.problem ? h("p", {class: "mute"}, absent(seen.job, seen.problem)) : "",
      h("div", {class: "facts"}, fact("State", stateMark(seen.state)), fact("Stage", stageOf(seen)), fact("Time left", duration(seen.seconds_left)), fact("Reward", number(seen.reward)),
        fact("KL, nats", number(seen.kl)), fact("Samples per second", number(seen.samples_per_second)), fact("Seed", seen.seed ?? "–"), fact("Took", duration(seen.seconds))),
      seen.total ? h("progress", {max: seen.total, value: seen.done || 0, "aria-label": "Progress of the stage"}) : "");
    swap(present, now(seen.live));
    const ppo = stages.ppo || new Map();
    chart("Reward per sample", "iteration", "reward", ppo, seen.health.unhealthy);
    chart("KL to the reference, nats per response", "iteration", "kl", ppo, seen.health.unhealthy);
    const evaluations = stages.evaluation || new Map(), answered = [...evaluations.values()].pop()?.metrics || {};
    if (evaluations.size > 1) for (const name of Object.keys(answered)) if (`${name}_ci95` in answered) chart(`Evaluation: ${name}`, "iteration", name, evaluations);
    chart("Loss", "step", "loss", ppo.size ? new Map() : stages.dpo || stages.reward || stages.sft || new Map());
    const pairs = (rows, caption) => h("table", {"aria-label": caption}, h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))));
    swap(rest, earlier(seen.health), ...[planTable(seen.plan || [])].flat(),
      ...((seen.results || []).length ? [h("h3", {}, "Results"), table([{label: "What"}, {label: "Before or first", n: true}, {label: "After or last", n: true}], seen.results, "Results")] : []),
      ...shares("Where the time of all iterations went", seen.phases || []), seen.overlap ? h("p", {}, seen.overlap) : "",
      ...billTable(bill),
      ...((seen.placement?.alternatives || []).length ? [h("details", {}, h("summary", {}, "Plans that were not chosen"), table([{label: "Placement"}, {label: "Seconds", n: true}, {label: "Why"}],
        seen.placement.alternatives.map((other) => [other.placement, number(other.seconds), other.problem || other.note || "slower"]), "Other plans"))] : []),
      ...((seen.facts || []).length ? [h("h3", {}, "The run"), pairs([...seen.facts, ...(seen.models?.length ? [["Models", seen.models.join(", ")]] : []), ["Versions", Object.entries(seen.versions || {}).map((each) => each.join(" ")).join(", ") || "–"], ["Began", moment(seen.began)]], "The run")] : []),
      seen.manifest ? h("details", {}, h("summary", {}, "The manifest"), h("pre", {tabindex: 0}, seen.manifest)) : "",
      ...((seen.changes || []).length ? [h("h3", {}, "Changes of the manifest"), table([{label: "After"}, {label: "Field"}, {label: "Old"}, {label: "New"}], seen.changes.map((c) => [`${c.stage} ${c.step}`, c.field, c.old ?? "–", c.new ?? "–"].map(String)), "Changes"),
        seen.changes.some((c) => c.field === "trainer ranks") ? h("p", {class: "mute"}, "Other trainer ranks add up gradients in another order, so weights differ by rounding.") : ""] : []));
  }
  await refresh();
  // No file changes during a step, but the coordinator knows its progress.
  if (source.kind === "folder") {
    const timer = setInterval(async () => {
      if (signal.aborted) clearInterval(timer);
      else if (!document.hidden && present.childElementCount) swap(present, now(await source.live(id, signal).catch(() => null)));
    }, 1000 * LIVE_SECONDS);
  }
  return {refresh};
}
