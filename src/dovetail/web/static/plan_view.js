// Shows a predicted iteration, GPU by GPU (dovetail plan --html), or a pipeline schedule (dovetail schedule -o).

import {colourOf, h, kindOf, legend, table} from "./dom.js";
import {lanes, shares} from "./lanes.js";

export async function planView({source, root, about}) {
  const plan = await source.document(about.run, "plan");
  document.title = `${about.run}: Dovetail plan`;
  root.replaceChildren(h("h2", {}, about.run), ...plan.facts.map((fact) => h("p", {}, fact)), ...shares("Phases", plan.phases),
    legend([...new Map(plan.lanes.flatMap((lane) => lane.bars.map(([name]) => [kindOf(name), colourOf(name)])))]),
    lanes({title: plan.title, unit: plan.unit, lanes: plan.lanes}),
    ...plan.tables.flatMap(({title, columns, rows}) => [h("h3", {}, title), table(columns.map((label) => ({label})), rows, title)]));
  return {};
}
