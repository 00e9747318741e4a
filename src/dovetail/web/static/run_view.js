// Shows one run. It has tabs, and a stream that tells when to read again.

import {h} from "./dom.js";
import {hrefOf} from "./runs_view.js";
import {eventsTab} from "./events_tab.js";
import {jobTab} from "./job_tab.js";
import {metricsTab} from "./metrics_tab.js";
import {absent, overviewTab, whyNot} from "./overview_tab.js";
import {samplesTab} from "./samples_tab.js";
import {sampleTab} from "./sample_tab.js";
import {scheduleTab} from "./schedule_tab.js";
import {timelineTab} from "./timeline_tab.js";

const TABS = {overview: ["Overview", overviewTab], metrics: ["Metrics", metricsTab], samples: ["Samples", samplesTab], timeline: ["Timeline", timelineTab], schedule: ["Schedule", scheduleTab], events: ["Events", eventsTab]};

export async function runView(context) {
  const {source, root, signal, say, args} = context;
  const [id, tab = "overview", ...rest] = args;
  const tabs = source.kind === "cluster" ? {...TABS, job: ["Job", jobTab]} : TABS;
  const shown = tab === "sample" ? sampleTab : (tabs[tab] || tabs.overview)[1];
  const body = h("div");
  const links = Object.entries(tabs).map(([name, [label]]) =>
    h("a", {href: hrefOf(id, name), "aria-current": name === tab || (name === "samples" && tab === "sample") ? "page" : null}, label));
  root.replaceChildren(h("h2", {}, id), h("nav", {"aria-label": "Parts of the run"}, links), body);
  document.title = `${id}: Dovetail`;
  let found = null, busy = false, again = null;
  // If a tab cannot be shown now, it is tried again when something changes.
  async function open() {
    try {
      found = (await shown({...context, id, body, args: rest})) || {};
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) return;
      const job = source.kind === "cluster" ? await source.job(id, signal).catch(() => null) : null;
      body.replaceChildren(job && whyNot(job) ? h("div", {class: "note warn"}, h("b", {}, job.state), whyNot(job)) : "", h("p", {class: "mute"}, job ? absent(job, error.message) : error.message));
    }
  }
  await open();
  if (signal.aborted) return {};
  const refresh = async (change) => {
    if (signal.aborted) return;
    if (!found) { await open(); return; }
    if (!found.refresh) return;
    if (busy) { again = {...again, ...change}; return; }
    busy = true;
    try {
      await found.refresh(change);
      say("");
    } catch (error) {
      if (error.name !== "AbortError" && !signal.aborted) say(error.message);
    }
    busy = false;
    if (again) { const next = again; again = null; setTimeout(() => refresh(next), 400); }
  };
  source.follow(id, refresh, signal, say);
  return {key: (key) => {
    const place = Number(key);
    if (place >= 1 && place <= links.length) links[place - 1].click();
    else found?.key?.(key);
  }};
}
