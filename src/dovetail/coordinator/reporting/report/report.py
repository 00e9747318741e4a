"""Makes report.html, which shows a run in one file, without scripts and without other files to load. It is made from
summary.json, history.jsonl and the iterations' traces."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dovetail.coordinator.reporting.page.iteration_timeline import timeline
from dovetail.coordinator.reporting.page.overview import job_name
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.reporting.report import charts
from dovetail.coordinator.reporting.report.charts import ChartBar, Series
from dovetail.coordinator.reporting.report.report_run import run_section
from dovetail.coordinator.reporting.report.report_samples import read_samples, samples_section
from dovetail.coordinator.reporting.report.report_schedule import families_section, schedule_section
from dovetail.coordinator.reporting.report.run_summary import (
    PHASES,
    duration,
    fusion_rows,
    health_rows,
    health_sentences,
    how_it_ended,
    overlap_sentence,
    read_summary,
    stage_seconds,
)
from dovetail.coordinator.reporting.summary_rows import get, method, outcome, rows
from dovetail.coordinator.store.manifest_changes import RANKS
from dovetail.protocol.errors import RunError
from dovetail.protocol.files.durable import read_object
from dovetail.protocol.files.row_stages import EVALUATION

STYLE = """
:root{color-scheme:light dark;--fg:#1b1f24;--mute:#667;--line:#8884;--card:#fff;--bg:#f4f5f7}
@media(prefers-color-scheme:dark){:root{--fg:#e6e8eb;--mute:#9aa3ad;--card:#1d2126;--bg:#14171a}}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:28px 0 8px}
.sub{color:var(--mute);margin:2px 0 18px}.bad{color:#c0392b}.warn{color:#b9770e}
table{border-collapse:collapse;background:var(--card);border-radius:8px;width:100%}
@media(max-width:700px){table{display:block;overflow-x:auto}}
th,td{padding:6px 12px;text-align:right;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}th{color:var(--mute);font-weight:500}tr:last-child td{border-bottom:0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr));gap:14px}
figure{margin:0;background:var(--card);border-radius:8px;padding:10px 12px}
figure.wide{margin-bottom:14px;overflow-x:auto}
figcaption{font-weight:600;margin-bottom:4px}svg{width:100%;max-width:480px;height:auto;display:block}
figure.wide svg{max-width:none;min-width:760px}details{margin-top:10px}summary{cursor:pointer}
pre{background:var(--card);border-radius:8px;padding:10px 12px;overflow-x:auto;font-size:13px}
.grid{stroke:var(--line);stroke-width:1}.stripe{fill:#8881}.tick{font-size:11px;fill:var(--mute)}
.axis{font-size:12px;fill:var(--mute)}.inbar{font-size:12px;fill:#fff;font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:12.5px;color:var(--mute);margin-top:6px}
td.text{text-align:left;white-space:pre-wrap;overflow-wrap:anywhere;vertical-align:top}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
"""

# The title, the label of the x axis, and a tuple for each line: its label, its metric, and the metric that has half the
# width of its interval. None if there is no interval.
_Chart = tuple[str, str, tuple[tuple[str, str, str | None], ...]]
CHARTS: dict[str, tuple[_Chart, ...]] = {
    "sft": (("SFT: loss", "step", (("loss", "loss", None),)),),
    "reward": (
        ("Reward model: loss", "step", (("loss", "loss", None),)),
        ("Reward model: accuracy on training pairs", "step", (("accuracy", "accuracy", None),)),
    ),
    "dpo": (
        ("DPO: loss", "step", (("loss", "loss", None),)),
        ("DPO: accuracy on training pairs", "step", (("accuracy", "accuracy", None),)),
        (
            "DPO: rewards, beta times the log-ratio to the reference",
            "step",
            (("chosen", "rewards/chosen", None), ("rejected", "rewards/rejected", None)),
        ),
    ),
    "ppo": (
        ("Reward per sample, 95% interval", "iteration", (("reward", "reward", "reward_ci95"),)),
        ("KL to the reference, nats per sample", "iteration", (("KL", "kl", "kl_ci95"),)),
        (
            "Response length, tokens",
            "iteration",
            (("mean", "response_length", None), ("longest", "response_length_max", None)),
        ),
        ("Entropy, nats per token", "iteration", (("entropy", "entropy", None),)),
        ("Value loss", "iteration", (("value loss", "value_loss", None),)),
        ("Policy loss", "iteration", (("policy loss", "policy_loss", None),)),
        (
            "Clipped share of tokens",
            "iteration",
            (("policy", "clipfrac", None), ("value", "value_clipfrac", None)),
        ),
        (
            "Generation and inference: seconds",
            "iteration",
            (("measured", "fusion_stage_seconds", None), ("predicted", "fusion_predicted_seconds", None)),
        ),
        (
            "Inter-stage fusion: seconds saved",
            "iteration",
            (("measured", "fusion_saved_seconds", None), ("predicted", "fusion_predicted_saved_seconds", None)),
        ),
        ("Samples per second", "iteration", (("samples/s", "samples_per_second", None),)),
    ),
}
_STAGES = {"sft": "Supervised fine-tuning", "reward": "Reward model", "dpo": "Direct preference optimisation"}


def chart_metrics(stage: str) -> set[str]:
    """The names of the metrics that a stage's charts show."""
    return {name for _, _, lines in CHARTS[stage] for _, *names in lines for name in names if name is not None}


def read_history(run_dir: Path) -> dict[str, dict[int, dict[str, float]]]:
    """Read history.jsonl as {stage: {step: metrics}}. If a step has several lines, the last one counts. A line that a
    crash cut off is skipped."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    try:
        lines = (run_dir / "history.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    for line in lines:
        try:
            entry = json.loads(line)
            found.setdefault(entry["stage"], {})[int(entry["step"])] = dict(entry["metrics"])
        except (ValueError, KeyError, TypeError):
            continue
    return {stage: dict(sorted(steps.items())) for stage, steps in found.items()}


def series(steps: Mapping[int, Mapping[str, Any]], label: str, metric: str, band: str | None) -> Series:
    """One metric over the steps. Steps without the metric are left out."""
    kept = [(k, m) for k, m in steps.items() if isinstance(m.get(metric), int | float)]
    widths = [float(m.get(band) or 0.0) for _, m in kept] if band else None
    return Series(label, [float(k) for k, _ in kept], [float(m[metric]) for _, m in kept], widths)


def last_trace(run_dir: Path) -> tuple[str, dict[str, Any]] | None:
    """The name and content of the trace to show. It is that of the last iteration but one, if there is one, because the
    last iteration also has the final checkpoint. None if there is no trace."""
    files = sorted(p for p in (run_dir / "traces").glob("iteration-*.json") if re.fullmatch(r"iteration-\d+", p.stem))
    for path in [*files[-2:-1], *files[-1:], *reversed(files[:-2])]:
        if (document := read_object(path)).get("traceEvents"):
            return path.stem, document
    return None


def trace_bars(lanes: Iterable[Mapping[str, Any]]) -> list[ChartBar]:
    """The bars of a timeline's lanes. A lane becomes the track 'process / lane'."""
    bars = []
    for lane in lanes:
        track = lane["process"] if lane["lane"] == "main" else f"{lane['process']} / {lane['lane']}"
        bars += [ChartBar(str(track), str(name), start, end, detail) for name, start, end, detail in lane["bars"]]
    return bars


def trace_curves(curves: Mapping[str, Sequence[Sequence[float]]], prefix: str) -> list[Series]:
    """The counters of a timeline whose names begin with `prefix`, as values over seconds."""
    return [
        Series(name, [at for at, _ in points], [value for _, value in points])
        for name, points in sorted(curves.items())
        if name.startswith(prefix)
    ]


def _table(summary: Mapping[str, Any]) -> str:
    body = [(what, first, last) for what, first, last in rows(summary)]
    if isinstance(get(summary, "samples_per_second"), int | float):
        body.append(("Samples per second", "", f"{summary['samples_per_second']:.2f}"))
    body += health_rows(summary) + fusion_rows(summary)
    body += [(f"Time of stage {name}", "", duration(s)) for name, s in stage_seconds(summary)]
    lines = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td><td>{escape(c)}</td></tr>" for a, b, c in body)
    head = "<tr><th></th><th>before / first</th><th>after / last</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{lines}</tbody></table>"


def changes_section(summary: Mapping[str, Any]) -> str:
    """The section on fields of the manifest that were changed during the run."""
    changed = summary.get("changes")
    if not isinstance(changed, list) or not changed:
        return ""
    cells = ("field", "old", "new")
    lines = "".join(
        f"<tr><td>{escape(str(c.get('stage')))} {escape(str(c.get('step')))}</td>"
        + "".join(f"<td>{escape('–' if c.get(key) is None else str(c.get(key)))}</td>" for key in cells)
        + "</tr>"
        for c in changed
    )
    head = "<tr><th>after step</th><th>field</th><th>old</th><th>new</th></tr>"
    ranks = any(isinstance(c, dict) and c.get("field") == RANKS for c in changed)
    note = (
        "<p>Other trainer ranks add up gradients in another order, so weights differ by rounding.</p>" if ranks else ""
    )
    return f"<h2>Changes of the manifest</h2><table><thead>{head}</thead><tbody>{lines}</tbody></table>{note}"


def _section(title: str, figures: Iterable[str]) -> str:
    drawn = [figure for figure in figures if figure]
    return f'<h2>{escape(title)}</h2><div class="charts">{"".join(drawn)}</div>' if drawn else ""


def render_report(
    name: str,
    summary: Mapping[str, Any],
    history: Mapping[str, Mapping[int, Mapping[str, Any]]],
    trace: tuple[str, Mapping[str, Any]] | None,
    schedule: Mapping[str, Any] = MappingProxyType({}),
    samples: str = "",
    run: str = "",
) -> str:
    """The page as HTML. `schedule`: the content of schedule.json. It is empty if no schedule was chosen. `samples`: the
    section on responses. `run`: the section on the manifest. Pure."""
    facts: list[str] = []
    if summary.get("wall_seconds") is not None:
        facts.append(duration(float(summary["wall_seconds"])))
    if summary.get("seed") is not None:
        facts.append(f"seed {summary['seed']}")
    state = str(summary.get("state") or "")
    ended = how_it_ended(summary)
    subtitle = "".join(f'<span class="bad">{escape(line)}</span><br>' for line in ended)
    subtitle += escape(", ".join(([state] if state and not ended else []) + facts))
    subtitle += "".join(f'<br><span class="warn">{escape(line)}</span>' for line in health_sentences(summary))
    said = f"<p><b>{escape(outcome(summary))}</b></p>" if outcome(summary) else ""
    sections = []
    for stage, heading in {**_STAGES, "ppo": method(summary)}.items():
        steps = history.get(stage, {})
        figures = [
            charts.line_chart(title, axis, [series(steps, *line) for line in lines])
            for title, axis, lines in CHARTS[stage]
        ]
        sections.append(_section(heading, figures))
    evaluations = history.get(EVALUATION, {})
    last = evaluations[max(evaluations)] if evaluations else {}
    measured = [name for name in last if f"{name}_ci95" in last]
    sections.append(
        _section(
            "Evaluation",
            [
                charts.line_chart(
                    f"Evaluation: {name}, 95% interval",
                    "iteration",
                    [series(evaluations, name, name, f"{name}_ci95")],
                )
                for name in measured
                if len(evaluations) > 1
            ],
        )
    )
    phases: Sequence[tuple[str, float]] = sorted(
        ((k, float(v)) for k, v in (get(summary, "phases") or {}).items()),
        key=lambda item: PHASES.index(item[0]) if item[0] in PHASES else len(PHASES),
    )
    time_bar = charts.share_bar("Where the time of all iterations went", phases)
    if time_bar and (overlap := overlap_sentence(summary)):
        time_bar += f'<p class="sub">{escape(overlap)}</p>'
    drawn = ""
    if trace is not None:
        number = int(trace[0].rpartition("-")[2])
        found = timeline(trace[1])
        drawn = charts.gantt(f"Timeline of iteration {number}", trace_bars(found["lanes"]), PHASES)
        left = trace_curves(found["curves"], "samples left")
        curve = charts.line_chart(f"Samples still to generate, iteration {number}", "second", left)
        drawn += f'<div class="charts">{curve}</div>' if curve else ""
    when = f"<h2>Time</h2>{time_bar}{drawn}" if time_bar or drawn else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}: Dovetail report</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(name)}</h1><p class="sub">{subtitle}</p>{said}{_table(summary)}{samples}{"".join(sections)}{when}'
        f"{schedule_section(schedule)}{run}{changes_section(summary)}{families_section(schedule)}"
        "</main></body></html>\n"
    )


def write_report(run_dir: Path) -> Path:
    """Write report.html into a run directory, atomically. Raises RunError if there is no summary.json."""
    summary = read_summary(run_dir)
    folder = RunFolder(run_dir)
    page = render_report(
        job_name(folder.job(), run_dir.name),
        summary,
        read_history(run_dir),
        last_trace(run_dir),
        folder.schedule(),
        samples_section(read_samples(run_dir, method(summary))),
        run_section(folder.parsed_job(), summary),
    )
    path = run_dir / "report.html"
    temporary = path.with_suffix(".html.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
    return path
