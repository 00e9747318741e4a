"""The report's section on the schedule of PPO's training, from the run's schedule.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dovetail.coordinator.reporting.report.charts import ChartBar, gantt

_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def schedule_bars(document: Mapping[str, Any]) -> list[ChartBar]:
    """The bars of a schedule document (`dovetail schedule -o`). Each rank is a track."""
    bars = []
    for rank, actions in enumerate(document["actions"]):
        for action in actions:
            name = f"{action['model']} {_KINDS[action['kind']]}"
            where = f"micro-batch {action['micro_batch']}, stage {action['stage']}"
            bars.append(ChartBar(f"rank {rank}", name, float(action["start"]), float(action["end"]), where))
    return bars


def schedule_section(found: Mapping[str, Any]) -> str:
    """The report's section on the schedule, or '' if there is no schedule. Pure."""
    if not found:
        return ""
    mini = int(found["mini_batches"])
    models = [str(model["name"]) for model in found["after"]["models"]]
    what = f"{mini} mini-batch{'es' if mini > 1 else ''} of {' and '.join(models)}"
    source = "default times (nothing was measured)"
    if _in_seconds(found):
        source = "times measured in this run" if found["measured"] else "the times of profile.json"
    before, after = schedule_bars(found["before"]), schedule_bars(found["after"])
    # Both charts have the same scale, so that one sees which schedule is shorter.
    end = max((bar.end for bar in (*before, *after)), default=0.0)
    axis = "seconds" if _in_seconds(found) else "units of time"
    return (
        f"<h2>Training schedule: {escape(str(found['chosen']))}</h2>{_facts(found)}"
        + gantt(f"Before: serial 1F1B, {what}, simulated with {source}", before, _names(models), end=end, axis=axis)
        + gantt(f"After: {found['chosen']}, {what}, simulated alike", after, _names(models), end=end, axis=axis)
    )


def families_section(found: Mapping[str, Any]) -> str:
    """The report's table of all families of schedules, folded, or '' without a schedule."""
    return f"<details><summary>All families of schedules</summary>{_families(found)}</details>" if found else ""


def _names(models: Sequence[str]) -> list[str]:
    return [f"{model} {kind}" for model in models for kind in _KINDS.values()]


def _in_seconds(found: Mapping[str, Any]) -> bool:
    """Whether the document is in seconds and bytes, and not in units of the default times."""
    return bool(found["measured"] or found.get("profiled"))


def _facts(found: Mapping[str, Any]) -> str:
    seconds = "s" if _in_seconds(found) else "units"
    before, after = float(found["before"]["makespan"]), float(found["after"]["makespan"])
    rows = [
        ("Serial 1F1B, predicted", f"{before:.3f} {seconds}"),
        (f"{found['chosen']}, predicted", f"{after:.3f} {seconds}"),
        ("Speed-up, predicted", f"{float(found['speedup']):.3f}"),
    ]
    if found.get("measured_seconds") and found["measured"]:
        rows.append((f"{found['chosen']}, measured", f"{float(found['measured_seconds']):.3f} s"))
    if found.get("communication") and _in_seconds(found):
        rows.append(("A message from stage to stage", f"{1e3 * float(found['communication']):.2f} ms"))
    rows.append(("Peak activation memory of a rank, predicted", _size(found, float(found["memory"]))))
    rows.append(("The same of serial 1F1B", _size(found, float(found["serial_memory"]))))
    if found.get("memory_limit"):
        rows.append(("Limit of activation memory", _size(found, float(found["memory_limit"]))))
    if found.get("measured_peak_bytes"):
        rows.append(("Peak activation memory of a rank, measured", f"{found['measured_peak_bytes'] / 2**20:.1f} MiB"))
    body = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    return f"<table><tbody>{body}</tbody></table><br>"


def _size(found: Mapping[str, Any], value: float) -> str:
    return f"{value / 2**20:.1f} MiB" if found.get("in_bytes", _in_seconds(found)) else f"{value:.2f} units"


def _families(found: Mapping[str, Any]) -> str:
    """A table of how much longer each other family takes."""
    best = float(found["after"]["makespan"])
    rows = []
    for name, family in sorted(found["families"].items(), key=lambda item: item[1]["makespan"]):
        loss = float(family["makespan"]) / best - 1
        note = (
            "chosen" if name == found["chosen"] else "" if family["runs_here"] else "not with this job's layout or pins"
        )
        published = str(family.get("published") or "")
        what = f"{name}: {family['description']}"
        cells = (what, published, f"{loss:+.1%}", _size(found, float(family["peak"])), note)
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    for name, reason in sorted(found.get("refused", {}).items()):
        rows.append(f"<tr><td>{escape(name)}</td><td></td><td>–</td><td>–</td><td>{escape(reason)}</td></tr>")
    head = "<tr><th>family</th><th>published as</th><th>time</th><th>peak activation</th><th></th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table><br>"
