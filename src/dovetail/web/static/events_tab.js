// Shows the events of a run, the newest first.

import {h, moment, swap, table} from "./dom.js";

const SHOWN = 200;
const BAD = /fail|lost|crash|dead|unhealthy|taken|missing/;

export async function eventsTab({source, id, body, signal}) {
  let events = [];
  const list = h("div");
  const filter = h("input", {type: "search", placeholder: "filter, as in trainers", "data-filter": true, "aria-label": "Filter events", oninput: () => draw()});
  body.replaceChildren(h("div", {class: "bar"}, filter, h("span", {class: "mute"}, "events.jsonl in the run's folder has all.")), list);
  function draw() {
    const wanted = filter.value.trim().toLowerCase();
    const rows = events.map(({time, event, process, ...fields}) => [time, event, Object.entries(fields).filter(([, value]) => value !== null && value !== "").map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")])
      .filter(([, event, told]) => !wanted || `${event} ${told}`.toLowerCase().includes(wanted)).reverse().slice(0, SHOWN);
    swap(list, rows.length ? table([{label: "Time"}, {label: "Event"}, {label: "What"}], rows.map(([time, event, told]) => [moment(time), h("span", {class: BAD.test(event) ? "bad" : ""}, event), told]), "Events of the run") : h("p", {class: "mute"}, "None."));
  }
  async function refresh() {
    ({events} = await source.document(id, "events", signal));
    draw();
  }
  await refresh();
  return {refresh};
}
