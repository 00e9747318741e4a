// The sources of runs: a folder (dovetail ui), jobs on a cluster (the status API), or this file (report.html). All answer the same requests.

export class Problem extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

async function ask(path, options = {}) {
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Is it still running?", 0);
  }
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({}));
  throw new Problem(said.detail || reply.statusText || `HTTP ${reply.status}`, reply.status);
}

// Calls onEvent(name, data, id) for each server-sent event until the stream ends. The browser's EventSource cannot send a token.
async function events(path, options, onEvent) {
  const reply = await ask(path, options);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const lines = rest.slice(0, end).split("\n").filter((line) => line[0] !== ":");
      const fields = Object.fromEntries(lines.map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (fields.event) onEvent(fields.event, JSON.parse(fields.data), fields.id);
    }
  }
}

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

// Reads a stream again and again until it has ended for good. `tell(message)` gets what is wrong now, or "" if all is well.
async function keep(read, signal, tell) {
  for (let wait = 1; !signal.aborted; wait = Math.min(15, wait * 2)) {
    try {
      if (await read(() => { wait = 1; tell(""); })) return;
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      tell(error.message);
      if ([400, 401, 403, 404].includes(error.code)) return;
    }
    await pause(wait);
  }
}

// A source's `_page(id, next, signal)` returns {rows, next, more}. `rows`: rows of the history from number `next` on. `next`: the
// number of the row after them. `more`: whether there are more rows now.
class Source {
  #history = new Map();

  // All rows so far. Only new ones are fetched, for one caller at a time.
  history(id, signal) {
    const known = this.#history.get(id) || {rows: [], next: 0, work: Promise.resolve()};
    this.#history.set(id, known);
    known.work = known.work.catch(() => null).then(() => this.#more(id, known, signal));
    return known.work;
  }

  // Whether there may be an answer to this question.
  has() { return true; }

  // The number of the first row that was not fetched yet. undefined if nobody has asked for rows.
  _next(id) { return this.#history.get(id)?.next; }

  async #more(id, known, signal) {
    for (let more = true; more;) {
      const page = await this._page(id, known.next, signal);
      known.rows.push(...page.rows);
      known.next = page.next;
      more = page.more;
    }
    return known.rows;
  }
}

export class FolderSource extends Source {
  kind = "folder";

  async list(signal) {
    return (await (await ask("api/v1/runs", {signal})).json()).runs;
  }

  async document(id, question, signal) {
    return (await ask(`api/v1/runs/${encodeURIComponent(id)}/${question}`, {signal})).json();
  }

  // The coordinator's status of the step in progress. null if there is no coordinator on this machine.
  async live(id, signal) {
    return (await (await ask(`api/v1/runs/${encodeURIComponent(id)}/live`, {signal})).json()).status;
  }

  async _page(id, next, signal) {
    return this.document(id, `history/${next}`, signal);
  }

  // Calls `onChange` when something changes. `id`: null follows the list of runs.
  follow(id, onChange, signal, tell) {
    const path = id === null ? "api/v1/changes" : `api/v1/runs/${encodeURIComponent(id)}/changes`;
    return keep(async (works) => {
      await events(path, {signal}, (name, data) => { works(); if (name === "changed") onChange(data); });
      return false;
    }, signal, tell);
  }
}

// The maximum number of rows in one answer of the status API.
const ROWS = 10_000;

export class ClusterSource extends Source {
  kind = "cluster";
  // "" is all namespaces.
  get namespace() { return sessionStorage.getItem("namespace") ?? "default"; }
  get place() { return this.namespace ? `namespace ${this.namespace}` : "all namespaces"; }
  set namespace(name) { sessionStorage.setItem("namespace", name); }
  get token() { return sessionStorage.getItem("token") || ""; }
  set token(token) { sessionStorage.setItem("token", token); }
  #options(signal, headers = {}) {
    return {signal, headers: this.token ? {...headers, Authorization: `Bearer ${this.token}`} : headers};
  }
  #path(id) {
    const [namespace, name] = id.split("/");
    return `api/v1/namespaces/${encodeURIComponent(namespace)}/rlhfjobs/${encodeURIComponent(name)}`;
  }

  async list(signal) {
    const found = [];
    const path = this.namespace ? `api/v1/namespaces/${encodeURIComponent(this.namespace)}/rlhfjobs` : "api/v1/rlhfjobs";
    for (let rest = ""; rest !== null;) {
      const query = `limit=500${rest ? `&continue=${encodeURIComponent(rest)}` : ""}`;
      const page = await (await ask(`${path}?${query}`, this.#options(signal))).json();
      found.push(...page.items);
      rest = page.continue || null;
    }
    return found.map((job) => ({
      id: `${job.namespace}/${job.name}`, name: job.name, group: job.name.replace(/-?(seed-?)?\d+$/, ""), seed: null, state: job.state, stage: job.stage,
      done: job.iteration, total: job.iterations, method: null, reward: job.reward, kl: job.kl, samples_per_second: job.samplesPerSecond,
      began: Date.parse(job.created) / 1000, ended: null,
    }));
  }

  async document(id, question, signal) {
    return (await ask(`${this.#path(id)}/run/${question}`, this.#options(signal))).json();
  }

  async job(id, signal) { return (await ask(this.#path(id), this.#options(signal))).json(); }
  async plan(id, signal) { return (await ask(`${this.#path(id)}/plan`, this.#options(signal))).json(); }
  async logs(id, signal) { return (await (await ask(`${this.#path(id)}/logs`, this.#options(signal))).json()).items; }
  async log(path, signal) { return (await ask(path.replace(/^\//, ""), this.#options(signal))).text(); }

  async _page(id, next, signal) {
    const page = await (await ask(`${this.#path(id)}/iterations?after=${next}&limit=${ROWS}`, this.#options(signal))).json();
    const rows = page.items.map((row) => ({...row, time: row.time ? Date.parse(row.time) / 1000 : null}));
    return {rows, next: page.next, more: page.next - next >= ROWS};
  }

  follow(id, onChange, signal, tell) {
    if (id === null) return this.#poll(onChange, signal);
    // If nobody has asked for the rows of a run, only its status is followed. Otherwise all rows would be sent here too.
    let last = this._next(id) ?? Number.MAX_SAFE_INTEGER;
    return keep(async (works) => {
      let over = false;
      await events(`${this.#path(id)}/events`, this.#options(signal, {"Last-Event-ID": `${last}`}), (name, data, number) => {
        works();
        if (number) last = Number(number);
        if (name === "end") over = true;
        onChange(name === "status" ? {job: data} : {});
      });
      return over;
    }, signal, tell);
  }

  async #poll(onChange, signal) {
    while (!signal.aborted) {
      await pause(5);
      if (!signal.aborted && !document.hidden) onChange({});
    }
  }
}

// The answers that this file holds, by question.
class FileSource extends Source {
  kind = "file";
  #answers;
  constructor(answers) {
    super();
    this.#answers = answers;
  }
  has(question) { return question in this.#answers; }
  async document(id, question) {
    if (!this.has(question)) throw new Problem("This file does not hold it. dovetail ui shows it from the run's folder.", 404);
    return this.#answers[question];
  }
  async live() { return null; }
  async _page(id, next) { return next ? {rows: [], next, more: false} : this.document(id, "history/0"); }
  follow() {}
}

export async function source() {
  const held = document.getElementById("data");
  if (held) {
    const {about, answers} = JSON.parse(held.textContent);
    return [new FileSource(answers), about];
  }
  const about = await (await ask("api/v1/about")).json();
  return [about.source === "cluster" ? new ClusterSource() : new FolderSource(), about];
}

// Sorts rows into {stage: Map(step -> row)}. If a step was done again, its last row counts.
export function byStage(rows) {
  const found = {};
  for (const row of rows) (found[row.stage] ||= new Map()).set(row.step, row);
  return Object.fromEntries(Object.entries(found).map(([stage, steps]) => [stage, new Map([...steps].sort((a, b) => a[0] - b[0]))]));
}
