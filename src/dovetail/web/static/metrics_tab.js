// Shows all metrics by category. If one chart is zoomed, all charts of its stage are zoomed alike.

import {h} from "./dom.js";
import {LineChart, Zoom} from "./line_chart.js";
import {axisOf, categorized, namesOf, points, STAGES} from "./metric_catalog.js";
import {overviewOf} from "./overview_tab.js";
import {byStage} from "./source.js";

const ORDER = ["ppo", "evaluation", "dpo", "reward", "sft"];

export async function metricsTab({source, id, body, signal}) {
  const charts = new Map(), zooms = new Map(), sections = h("div");
  const filter = h("input", {type: "search", placeholder: "filter, as in kl", "data-filter": true, "aria-label": "Filter metrics", oninput: () => sift()});
  const reset = h("button", {type: "button", onclick: () => { for (const zoom of zooms.values()) zoom.set(null); }}, "Show all steps");
  body.replaceChildren(h("div", {class: "bar"}, filter, reset, h("span", {class: "mute"}, "Drag over a chart to zoom.")), sections);

  function sift() {
    const wanted = filter.value.trim().toLowerCase();
    for (const [key, chart] of charts) chart.node.hidden = !chart.series.length || !key.toLowerCase().includes(wanted);
    for (const group of sections.querySelectorAll("section")) group.hidden = ![...group.querySelectorAll("figure")].some((figure) => !figure.hidden);
  }
  async function refresh() {
    const stages = byStage(await source.history(id, signal));
    const unhealthy = (await overviewOf(source, id, signal).catch(() => ({}))).health?.unhealthy || [];
    for (const stage of ORDER) {
      if (!stages[stage]) continue;
      if (!zooms.has(stage)) zooms.set(stage, new Zoom());
      for (const [category, entries] of categorized(namesOf(stages[stage]))) {
        const title = stage === "ppo" ? category : STAGES[stage];
        let group = [...sections.children].find((section) => section.dataset.title === title);
        if (!group) {
          group = h("section", {"data-title": title}, h("h3", {}, title), h("div", {class: "charts"}));
          sections.append(group);
        }
        for (const [name, meaning] of entries) {
          const key = `${stage}/${name}`;
          if (!charts.has(key)) {
            charts.set(key, new LineChart({title: name, note: meaning, axis: axisOf(stage), zoom: zooms.get(stage)}));
            group.lastChild.append(charts.get(key).node);
          }
          charts.get(key).update([{label: name, colour: "#3b82c4", points: points(stages[stage], name)}], stage === "ppo" ? unhealthy : []);
        }
      }
    }
    if (!charts.size) sections.replaceChildren(h("p", {class: "mute"}, "Nothing is finished yet."));
    else sections.querySelector(":scope > p")?.remove();
    sift();
  }
  await refresh();
  return {refresh};
}
