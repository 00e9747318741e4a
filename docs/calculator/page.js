// The form of the calculator and its answer.
const GIB = 2 ** 30;
const root = document.getElementById("calculator");
let worker = null;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function field(label, input) {
  return element("label", {}, element("span", { textContent: label }), input);
}

function number(name, value) {
  return element("input", { type: "number", name, value, min: 1, required: true });
}

function select(name, options) {
  return element("select", { name }, ...options.map(([value, text]) => element("option", { value, textContent: text })));
}

function table(caption, head, rows) {
  const row = (cells, tag) => element("tr", {}, ...cells.map((text) => element(tag, { textContent: text })));
  return element(
    "table",
    {},
    element("caption", { textContent: caption }),
    element("thead", {}, row(head, "th")),
    element("tbody", {}, ...rows.map((cells) => row(cells, "td"))),
  );
}

const seconds = (value) => (value == null ? "–" : `${Number(value.toPrecision(3))} s`);

function pool(products) {
  const remove = element("button", { type: "button", textContent: "remove" });
  const made = element(
    "fieldset",
    { className: "pool" },
    element("legend", { textContent: "GPUs" }),
    field("kind", select("product", products.map((name) => [name, name]))),
    field("nodes", number("nodes", 1)),
    field("GPUs of a node", number("gpusPerNode", 8)),
    field("price of a GPU hour", element("input", { type: "number", name: "pricePerGPUHour", min: 0, step: "any" })),
    remove,
  );
  remove.onclick = () => document.querySelectorAll(".pool").length > 1 && made.remove();
  return made;
}

function form(products, models) {
  const names = Object.keys(models);
  const pools = element("div", {}, pool(products));
  const more = element("button", { type: "button", textContent: "more GPUs of another kind" });
  more.onclick = () => pools.append(pool(products));
  const config = element("textarea", { name: "config", rows: 4, placeholder: "or paste a config.json here" });
  const made = element(
    "form",
    {},
    field("model", select("model", [...names.map((name) => [name, name]), ["", "of the config.json below"]])),
    field("config.json", config),
    field("method", select("method", [["grpo", "GRPO with a reward function"], ["ppo", "PPO with critic and reward model"]])),
    field("prompts of an optimizer step", number("prompts", 16)),
    field("samples of a prompt", number("samples", 8)),
    field("optimizer steps of an iteration", number("steps", 1)),
    field("tokens of a prompt, at most", number("promptTokens", 512)),
    field("tokens of a response, at most", number("responseTokens", 1024)),
    pools,
    more,
    element("button", { type: "submit", textContent: "Plan" }),
  );
  return made;
}

function read(made, models) {
  const found = {};
  for (const name of ["model", "method"]) found[name] = made.elements[name].value;
  for (const name of ["prompts", "samples", "steps", "promptTokens", "responseTokens"]) {
    found[name] = Number(made.elements[name].value);
  }
  found.pools = [...made.querySelectorAll(".pool")].map((each, i) => {
    const of = (name) => each.querySelector(`[name=${name}]`).value;
    const price = of("pricePerGPUHour");
    return {
      name: `pool-${i}`,
      product: of("product"),
      nodes: Number(of("nodes")),
      gpusPerNode: Number(of("gpusPerNode")),
      ...(price ? { pricePerGPUHour: Number(price) } : {}),
    };
  });
  if (found.model) found.config = models[found.model];
  else {
    try {
      found.config = JSON.parse(made.elements.config.value);
    } catch {
      throw new Error("The config.json is no JSON: paste the whole file, or choose a model.");
    }
  }
  return found;
}

function copied(title, text, name) {
  const button = element("button", { type: "button", textContent: "copy" });
  button.onclick = () => navigator.clipboard.writeText(text);
  return element("section", {}, element("h3", { textContent: title }, button), element("pre", { className: name, textContent: text }));
}

function answered(found) {
  if (found.error) return [element("p", { className: "error", role: "alert", textContent: found.error })];
  const told = found.plan.prediction ?? found.best;
  const price = found.best.samplesPerDollar;
  const memory = told.memory.flatMap((each) =>
    Object.entries(each.parts).map(([part, bytes]) => [
      `${each.group}[${each.first}:${each.first + each.gpus}]`,
      part,
      `${(bytes / GIB).toFixed(1)} GiB`,
    ]),
  );
  return [
    element("p", {
      className: "told",
      textContent:
        `${told.placement}${told.note ? `, ${told.note}` : ""}: an iteration takes ${seconds(told.iterationSeconds)}` +
        `, ${Number(told.samplesPerSecond.toPrecision(3))} samples a second` +
        (price ? `; 1,000 samples cost ${Number((1000 / price).toPrecision(3))}.` : "."),
    }),
    table(
      "Layout",
      ["task", "GPUs", "pp × tp × dp", "micro-batch", "alone", ""],
      told.tasks.map((t) => [
        t.task,
        `${t.group}[${t.first}:${t.first + t.gpus}]`,
        `${t.pp} × ${t.tp} × ${t.dp}`,
        t.microBatch,
        seconds(t.seconds),
        t.details.join(", "),
      ]),
    ),
    table("Seconds", ["phase", "time"], Object.entries(told.phases).map(([name, value]) => [name, seconds(value)])),
    table("Memory of a GPU", ["GPUs", "part", "size"], memory),
    table(
      "Decided against",
      ["placement", "", "iteration", "why not"],
      found.best.alternatives.map((a) => [a.placement, a.note, seconds(a.seconds), a.problem ?? "slower, or not worth its parts"]),
    ),
    copied("The manifest", found.yaml, "manifest"),
    ...Object.entries(found.peers).map(([name, text]) => copied(`The same layout in ${name}`, text, "peer")),
  ];
}

async function main() {
  const get = async (name) => (await fetch(new URL(name, import.meta.url))).json();
  let files;
  try {
    files = await get("files.json");
  } catch {
    root.textContent = "The planner's files are not on this site, or it has no web server: run make docs, and serve build/site.";
    return;
  }
  const models = await get("models.json");
  const made = form(files.products, models);
  const state = element("p", { role: "status" });
  const shown = element("div", { id: "answer" });
  const weight = `The first plan loads ${(files.bytes / 1e6).toFixed(1)} MB from this site.`;
  root.replaceChildren(element("p", { textContent: weight }), made, state, shown);
  made.onsubmit = (event) => {
    event.preventDefault();
    shown.replaceChildren();
    let asked;
    try {
      asked = read(made, models);
    } catch (error) {
      shown.replaceChildren(...answered({ error: error.message }));
      return;
    }
    worker ??= new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    state.textContent = "Planning …";
    worker.onmessage = ({ data }) => {
      state.textContent = "";
      shown.replaceChildren(...answered(data));
    };
    worker.onerror = () => {
      state.textContent = "";
      shown.replaceChildren(...answered({ error: "The browser could not start the planner: it needs WebAssembly and workers." }));
    };
    worker.postMessage(asked);
  };
}

main();
