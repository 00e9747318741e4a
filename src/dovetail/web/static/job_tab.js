// Shows what Kubernetes knows of a job: why it waits, its groups, plan, checkpoint, results, conditions, events and logs.

import {h, swap, table} from "./dom.js";
import {whyNot} from "./overview_tab.js";

export async function jobTab({source, id, body, signal}) {
  const top = h("div"), logs = h("div"), text = h("pre", {hidden: true, tabindex: 0});
  body.replaceChildren(top, h("h3", {}, "Logs"), logs, text);
  const section = (title, content) => (content ? [h("h3", {}, title), content] : []);

  function show(job) {
    const {status} = job, checkpoint = status.lastCheckpoint, plan = status.plan, why = whyNot(job);
    const instances = Object.entries(job.live?.status?.instances || {});
    swap(top, 
      why ? h("div", {class: job.state === "Failed" ? "note bad" : "note warn"}, h("b", {}, job.state), why) : "",
      job.live.reachable || job.state !== "Running" ? "" : h("p", {class: "mute"}, `Live progress: ${job.live.message}.`),
      ...section("Groups", status.groups?.length ? table([{label: "Group"}, {label: "Ready", n: true}, {label: "Wanted", n: true}],
        status.groups.map((group) => [group.name, h("span", {class: group.ready < group.desired ? "warn" : ""}, group.ready), group.desired]), "Groups") : null),
      ...section("Servers", instances.length ? table([{label: "Server"}, {label: "Kind"}, {label: "State"}, {label: "Why"}], instances.map(([name, i]) => [name, i.kind, i.state, i.reason]), "Servers") : null),
      ...section("Plan", plan ? h("p", {}, [plan.placement, plan.schedule && `schedule ${plan.schedule}`, plan.actor && `actor ${plan.actor}`, plan.critic && `critic ${plan.critic}`, plan.rollouts !== null && plan.rollouts !== undefined && `${plan.rollouts} rollouts`].filter(Boolean).join(", ")) : null),
      ...section("Checkpoint", checkpoint ? h("p", {}, `${checkpoint.stage} ${checkpoint.step}${checkpoint.time ? `, ${new Date(checkpoint.time).toLocaleString()}` : ""}: `, h("code", {}, checkpoint.path)) : null),
      ...section("Results", status.artifacts?.length ? table([{label: "Model"}, {label: "Claim"}, {label: "Path"}, {label: "Copy"}], status.artifacts.map((a) => [a.name, a.claim, a.path, a.copy || "–"]), "Results") : null),
      ...section("Conditions", job.conditions.length ? table([{label: "Condition"}, {label: "Holds"}, {label: "Reason"}, {label: "Message"}, {label: "Since"}],
        job.conditions.map((c) => [c.type, c.status, c.reason, c.message, new Date(c.lastTransitionTime).toLocaleString()]), "Conditions") : h("p", {class: "mute"}, "The operator has not looked at this job yet.")),
      ...section("Events", job.events === null ? h("p", {class: "mute"}, "You may not list events in this namespace.") : job.events.length ? table([{label: "Time"}, {label: "Reason"}, {label: "Message"}],
        job.events.map((e) => [e.time ? new Date(e.time).toLocaleString() : "–", h("span", {class: e.type === "Warning" ? "bad" : ""}, e.reason), e.message]), "Events") : h("p", {class: "mute"}, "None.")));
  }
  show(await source.job(id, signal));
  source.logs(id, signal).then((items) => {
    const read = (item) => h("button", {type: "button", onclick: async () => {
      text.hidden = false;
      try { text.textContent = (await source.log(item.log, signal)) || "(empty)"; } catch (error) { text.textContent = error.message; }
    }}, item.pod);
    logs.replaceChildren(items.length ? table([{label: "Pod"}, {label: "Group"}, {label: "Phase"}, {label: "Node"}], items.map((item) => [read(item), item.group, item.phase, item.node]), "Logs") : h("p", {class: "mute"}, "No pods."));
  }).catch((error) => { if (error.name !== "AbortError") logs.replaceChildren(h("p", {class: "mute"}, error.message)); });
  return {refresh: async (change) => { show(change.job || await source.job(id, signal)); }};
}
