// Runs the planner in a web worker, so that the page does not freeze. All files are the site's own.
import { loadPyodide } from "./pyodide.mjs";

const here = new URL("./", import.meta.url).href;

async function bytes(name) {
  const answer = await fetch(here + name);
  if (!answer.ok) throw new Error(`${name} is not on this site: run make docs again`);
  return answer.arrayBuffer();
}

async function begin() {
  const { wheel } = await (await fetch(here + "files.json")).json();
  const [python, core, planner] = await Promise.all([loadPyodide({ indexURL: here }), bytes(wheel), bytes("planner.zip")]);
  python.unpackArchive(core, "wheel");
  python.unpackArchive(planner, "zip", { extractDir: python.runPython("import sysconfig; sysconfig.get_path('purelib')") });
  python.runPython(`
import json, yaml
from answers.form import answer

def ask(form):
    found = answer(json.loads(form))
    if "manifest" in found:
        found["yaml"] = yaml.safe_dump(found["manifest"], sort_keys=False, default_flow_style=None, width=110)
    return json.dumps(found)
`);
  return python.globals.get("ask");
}

const ready = begin();

self.onmessage = async ({ data }) => {
  try {
    const ask = await ready;
    self.postMessage(JSON.parse(ask(JSON.stringify(data))));
  } catch (error) {
    self.postMessage({ error: `The planner failed: ${String(error.message ?? error).trim().split("\n").pop()}` });
  }
};
