// Shows one sample: its conversation, its tokens with their log-probabilities, and the servers and weights that made them.

import {COLOURS, h, moment, number, s, select} from "./dom.js";
import {hrefOf} from "./runs_view.js";

const VIEWS = {
  logprob: ["log-probability", (t, i) => t.logprob[i], (v) => Math.min(1, -v / 6), [192, 60, 50]],
  surprise: ["KL to the reference", (t, i) => (t.reference ? t.logprob[i] - t.reference[i] : undefined), (v) => Math.min(1, Math.abs(v) / 2), [120, 90, 200]],
  value: ["the critic's value", (t, i) => t.value?.[i], null, [50, 140, 90]],
};

export async function sampleTab({source, id, body, args, signal}) {
  const [iteration, prompt, sample] = args.map(Number);
  const found = await source.document(id, `sample/${iteration}/${prompt}/${sample}`, signal);
  const [before, after] = [found.before, found.after].map((place) => (place && source.has(`sample/${iteration}/${place.join("/")}`) ? hrefOf(id, "sample", iteration, ...place) : null));
  const link = (href, text) => (href ? h("a", {href}, text) : h("span", {class: "mute"}, text));
  const parts = [`reward ${number(found.reward)}`, ...Object.entries(found.rewards || {}).map(([name, value]) => `${name} ${number(value)}`), `KL ${number(found.kl)}`, `${found.tokens} tokens`,
    found.finish_reason === "length" ? "cut at the limit" : "ended by itself", found.staleness ? `${found.staleness} iterations old when learnt` : ""].filter(Boolean);
  body.replaceChildren(
    h("div", {class: "bar"}, h("a", {href: hrefOf(id, "samples", iteration)}, `Iteration ${iteration}`), h("b", {}, `prompt ${prompt}, sample ${sample}`), link(before, "← last (k)"), link(after, "next (j) →")),
    h("p", {}, parts.join(", ")),
    found.not_learnt ? h("div", {class: "note warn"}, h("b", {}, "Not learnt"), found.not_learnt, ".") : "",
    h("h3", {}, "Conversation"), h("div", {}, found.turns.map((turn) => {
      const learnt = turn.learnt && !found.not_learnt;
      return h("div", {class: `turn ${turn.role} ${learnt ? "learnt" : "masked"}`}, h("b", {}, turn.role, learnt ? "" : turn.learnt ? " (masked)" : ""), turn.text);
    })),
    ...tokens(found), ...life(found.life),
    Object.keys(found.fields || {}).length ? h("details", {}, h("summary", {}, "Other fields of the prompt"), h("pre", {}, JSON.stringify(found.fields, null, 2))) : "");
  return {key: (key) => { const href = key === "j" ? after : key === "k" ? before : null; if (href) location.hash = href; }};
}

function tokens(found) {
  const told = found.tokens_of;
  if (!told.response) return [h("h3", {}, "Tokens"), h("p", {class: "mute"}, "Their log-probabilities are kept for the iterations since the oldest checkpoint (spec.checkpoint.keep).")];
  const box = h("div", {class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; the arrow keys read one after the other"}), read = h("output", {"aria-live": "polite"});
  let view = "logprob", chosen = -1, spans = [];
  const tell = (i) => {
    const values = Object.values(VIEWS).map(([name, get]) => [name, get(told, i)]).filter(([, value]) => Number.isFinite(value)).map(([name, value]) => `${name} ${number(value)}`);
    return `token ${i + 1} ${JSON.stringify(told.response[i])}: ${values.join(", ")}`;
  };
  function choose(i) {
    spans[chosen]?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(told.response.length - 1, i));
    spans[chosen].classList.add("chosen");
    read.textContent = tell(chosen);
  }
  function draw() {
    const [, get, scale, colour] = VIEWS[view];
    const values = told.response.map((_, i) => get(told, i)), high = Math.max(...values.map(Math.abs), 1e-6);
    spans = told.response.map((text, i) => {
      const depth = Number.isFinite(values[i]) ? (scale ? scale(values[i]) : Math.abs(values[i]) / high) : 0;
      return h("span", {class: found.not_learnt ? "masked" : null, colour: `rgba(${colour.join(",")},${(0.65 * depth).toFixed(3)})`, title: tell(i), onclick: () => choose(i)}, text);
    });
    box.replaceChildren(h("span", {class: "masked", title: "the prompt: masked, nothing is learnt from it"}, told.prompt.join("")), ...spans);
  }
  box.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") choose(chosen + 1);
    else if (event.key === "ArrowLeft") choose(chosen < 0 ? 0 : chosen - 1);
    else return;
    event.preventDefault();
  });
  draw();
  const there = Object.entries(VIEWS).filter(([, [, get]]) => Number.isFinite(get(told, 0))).map(([key, [name]]) => [key, name]);
  return [h("h3", {}, "Tokens"), h("div", {class: "bar"}, select("Coloured by", there, view, (value) => { view = value; draw(); }), h("span", {class: "mute"}, "The prompt is masked.")), box, read,
    told.left_out ? h("p", {class: "mute"}, `${told.left_out} more tokens are not shown.`) : ""];
}

function life({parts, steps}) {
  const W = 1000, total = Math.max(1, ...parts.map((part) => part.to)), servers = [...new Set(parts.map((part) => part.server))];
  const strip = s("svg", {viewBox: `0 0 ${W} 26`, role: "img", "aria-label": "Which server made which tokens", preserveAspectRatio: "none"}, parts.map((part) =>
    s("rect", {x: (part.from / total) * W, y: 2, width: Math.max(1, ((part.to - part.from) / total) * W - 1), height: 22, rx: 3, fill: COLOURS[servers.indexOf(part.server) % COLOURS.length]},
      s("title", {}, `tokens ${part.from + 1} to ${part.to} on ${part.server} with weights ${part.version}`))));
  return [h("h3", {}, "Life"), strip, h("p", {class: "mute"}, parts.map((part) => `tokens ${part.from + 1} to ${part.to} on ${part.server} with weights ${part.version ?? "?"}`).join("; ")),
    h("ol", {}, steps.map((step) => h("li", {}, step.text, step.time ? h("span", {class: "mute"}, ` (${moment(step.time)})`) : "")))];
}
