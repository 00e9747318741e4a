"""Turns an iteration's trace into bars on lanes, and shows its training schedule as planned and as run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]
# The maximum number of bars of one timeline. A browser draws this many without delay.
BARS = 6000
_ACTION = re.compile(r"(actor|critic) ([FBIW])(\d+)")


def timeline(trace: Mapping[str, Any]) -> Document:
    """The timeline of a trace. Each of `lanes` has a process, a lane, and bars [name, start, end, detail] in seconds
    from the iteration's beginning. `curves` has counters as [seconds, value]. If there are more than BARS bars, the
    shortest ones are left out, and `left_out` is their number."""
    events = [event for event in trace.get("traceEvents") or [] if isinstance(event, Mapping)]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spans = [event for event in events if event.get("ph") == "X"]
    kept = sorted(spans, key=lambda event: -event["dur"])[:BARS]
    lanes: dict[tuple[Any, Any], list[list[Any]]] = {}
    for event in sorted(kept, key=lambda event: event["ts"]):
        end = (event["ts"] + event["dur"]) / 1e6
        bar = [event["name"], event["ts"] / 1e6, end, _detail(event.get("args") or {})]
        lanes.setdefault((event["pid"], event["tid"]), []).append(bar)
    curves: dict[str, list[list[float]]] = {}
    for event in events:
        if event.get("ph") == "C":
            curves.setdefault(str(event["name"]), []).append([event["ts"] / 1e6, float(event["args"]["value"])])
    return {
        "lanes": [
            {"process": processes.get(pid, str(pid)), "lane": names.get((pid, tid), str(tid)), "bars": lanes[pid, tid]}
            for pid, tid in sorted(lanes)
        ],
        "curves": curves,
        "left_out": len(spans) - len(kept),
    }


def _detail(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in list(args.items())[:6] if isinstance(value, str | int | float))


def drawn(schedule: Mapping[str, Any]) -> list[list[Document]]:
    """A schedule document's actions by rank."""
    return [
        [
            {
                "model": action["model"],
                "kind": action["kind"],
                "micro_batch": action["micro_batch"],
                "stage": action["stage"],
                "start": float(action["start"]),
                "end": float(action["end"]),
            }
            for action in rank
        ]
        for rank in schedule.get("actions") or []
    ]


def as_run(timeline: Mapping[str, Any]) -> list[list[Document]]:
    """The actions of the first run of mini-batches in a timeline, by trainer rank. Times count from the beginning of
    that run."""
    lanes = [lane for lane in timeline["lanes"] if str(lane["process"]).startswith("trainer")]
    runs = [bar for lane in lanes if lane["lane"] == "phases" for bar in lane["bars"] if "mini-batches" in bar[0]]
    if not runs:
        return []
    first = min(bar[0] for bar in runs)
    begin = min(bar[1] for bar in runs if bar[0] == first)
    end = max(bar[2] for bar in runs if bar[0] == first)
    ranks: dict[int, list[Document]] = {}
    for lane in lanes:
        if not str(lane["lane"]).startswith("actions"):
            continue
        rank = int(re.sub(r"\D", "", str(lane["process"])) or 0)
        for name, start, stop, _ in lane["bars"]:
            found = _ACTION.fullmatch(name)
            if found is None or not begin <= start <= end:
                continue
            ranks.setdefault(rank, []).append(
                {
                    "model": found[1],
                    "kind": found[2],
                    "micro_batch": int(found[3]),
                    "stage": None,
                    "start": start - begin,
                    "end": stop - begin,
                }
            )
    return [ranks[rank] for rank in sorted(ranks)]


def schedule_document(schedule: Mapping[str, Any], run: list[list[Document]], iteration: int | None) -> Document:
    """Serial 1F1B and the chosen family as planned, and the chosen one as it was run in `iteration`.

    If `in_seconds` is true, all times are in seconds. Otherwise the planned times are in units of the default times,
    and the run is left out. The result is {} without a schedule."""
    if not schedule:
        return {}
    in_seconds = bool(schedule.get("measured") or schedule.get("profiled"))
    best = float(schedule["after"]["makespan"])
    families = sorted((schedule.get("families") or {}).items(), key=lambda item: float(item[1]["makespan"]))
    return {
        "chosen": schedule.get("chosen"),
        "in_seconds": in_seconds,
        "mini_batches": schedule.get("mini_batches"),
        "speedup": schedule.get("speedup"),
        "serial": {"seconds": float(schedule["before"]["makespan"]), "ranks": drawn(schedule["before"])},
        "drawn": {"seconds": best, "ranks": drawn(schedule["after"])},
        "run": {
            "iteration": iteration,
            "seconds": max((action["end"] for rank in run for action in rank), default=0.0),
            "ranks": run,
        }
        if run and in_seconds
        else None,
        "families": [
            {
                "name": name,
                "description": family.get("description"),
                "published": family.get("published"),
                "peak": _size(schedule, family.get("peak")),
                "slower": float(family["makespan"]) / best - 1 if best else None,
                "runs_here": family.get("runs_here"),
            }
            for name, family in families
        ],
        "refused": schedule.get("refused") or {},
        "facts": _facts(schedule, in_seconds),
    }


def _facts(schedule: Mapping[str, Any], in_seconds: bool) -> list[tuple[str, str]]:
    """Lines (what, how much) about the chosen schedule's times and memory."""
    unit, found = "s" if in_seconds else "units", []
    source = "measured in this run" if schedule.get("measured") else "of profile.json" if in_seconds else "default ones"
    found.append(("Times that are drawn", source))
    if schedule.get("measured") and schedule.get("measured_seconds"):
        found.append((f"{schedule.get('chosen')}, measured", f"{schedule['measured_seconds']:.3f} {unit}"))
    if in_seconds and schedule.get("communication"):
        found.append(("A message from stage to stage", f"{1e3 * schedule['communication']:.2f} ms"))
    for name, what in (
        ("memory", "Peak activation memory of a rank, predicted"),
        ("serial_memory", "The same of serial 1F1B"),
        ("memory_limit", "Limit of activation memory"),
    ):
        if schedule.get(name):
            found.append((what, _size(schedule, schedule[name])))
    if schedule.get("measured_peak_bytes"):
        peak = f"{schedule['measured_peak_bytes'] / 2**20:.1f} MiB"
        found.append(("Peak activation memory of a rank, measured", peak))
    return found


def _size(schedule: Mapping[str, Any], value: float | None) -> str:
    if value is None:
        return "–"
    in_bytes = schedule.get("in_bytes", bool(schedule.get("measured") or schedule.get("profiled")))
    return f"{value / 2**20:.1f} MiB" if in_bytes else f"{value:.2f} units"
