// Shows the list of runs. Some of them can be chosen for comparison.

import {duration, h, moment, number, swap, table} from "./dom.js";

export const hrefOf = (id, ...rest) => `#/run/${[id, ...rest].map(encodeURIComponent).join("/")}`;

export function stateMark(state) {
  const kind = /^(failed|stopped)$/i.test(state) ? "bad" : /^(succeeded|completed)$/i.test(state) ? "good" : /^running$/i.test(state) ? "live" : /^interrupted$/i.test(state) ? "warn" : "";
  return h("span", {class: kind}, state);
}

export const STAGE_NAMES = {sft: "SFT", reward: "reward model", dpo: "DPO", ppo: "PPO"};
export function stageOf(run) {
  if (!run.stage) return "–";
  const name = run.stage === "ppo" ? run.method || "PPO" : STAGE_NAMES[run.stage] || run.stage;
  return `${name} ${run.done ?? 0}${run.total ? ` / ${run.total}` : ""}`;
}

export async function runsView({source, about, root, signal, say}) {
  const chosen = new Set();
  const box = h("div"), compare = h("a", {href: "#/", role: "button", hidden: true}, "");
  root.replaceChildren(h("div", {class: "bar"}, h("h2", {}, source.kind === "cluster" ? `Jobs in ${source.place}` : "Runs"), compare), box);
  const count = () => {
    compare.hidden = chosen.size < 2;
    compare.textContent = `Compare ${chosen.size} runs`;
    compare.href = `#/compare/${[...chosen].map(encodeURIComponent).join("/")}`;
  };
  if (source.kind === "cluster" && !source.token && !about.token) {
    box.replaceChildren(h("p", {class: "mute"}, "Give a bearer token, such as that of ", h("code", {}, "kubectl create token ACCOUNT"), "."));
    return;
  }
  async function refresh() {
    const runs = await source.list(signal);
    if (!runs.length) {
      box.replaceChildren(h("p", {class: "mute"}, source.kind === "cluster" ? `No RLHFJobs in ${source.place}.` : "No runs here yet. A run appears as soon as dovetail run has begun it."));
      return;
    }
    runs.sort((a, b) => (b.began || 0) - (a.began || 0));
    const rows = runs.map((run) => [
      h("input", {type: "checkbox", checked: chosen.has(run.id), "data-run": run.id, "aria-label": `Compare ${run.id}`, onchange: (event) => {
        if (event.target.checked) chosen.add(run.id); else chosen.delete(run.id);
        count();
      }}),
      h("a", {href: hrefOf(run.id, "overview")}, run.id), stateMark(run.state), stageOf(run), number(run.reward), number(run.kl), number(run.samples_per_second),
      run.seed ?? "–", moment(run.began), duration(run.seconds),
    ]);
    swap(box, table([{label: "", head: "Compare"}, {label: "Run"}, {label: "State"}, {label: "Stage"}, {label: "Reward", n: true}, {label: "KL", n: true},
      {label: "Samples/s", n: true}, {label: "Seed", n: true}, {label: "Began"}, {label: "Took"}], rows, "Runs"));
  }
  await refresh();
  // Changes that come during a request, or soon after it, are shown together a moment later. None is lost.
  let busy = false, again = false;
  async function follow() {
    if (busy) { again = true; return; }
    busy = true;
    do {
      again = false;
      try { await refresh(); } catch (error) { if (error.name !== "AbortError" && !signal.aborted) say(error.message); }
      await new Promise((resolve) => setTimeout(resolve, 900));
    } while (again && !signal.aborted);
    busy = false;
  }
  source.follow(null, follow, signal, say);
}
