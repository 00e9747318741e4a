"""Works out what a run's GPUs did and why they waited, from what the run records anyway: traces, history, events and
the outcomes of samples. The parts add up to the paid time of all GPUs."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.store.database import ReadOnlyDatabase, StoreError
from dovetail.coordinator.store.outcomes import Fate, Outcomes, counts_key
from dovetail.coordinator.store.store import KeyValues
from dovetail.manifest.types import RLHFJob, Stage
from dovetail.protocol.process.process_names import COORDINATOR, is_trainer, scorer_name

Document = dict[str, Any]
Spans = list[tuple[float, float]]
# The page of a run at work reads the traces of so many iterations only.
NEWEST = 200

# What GPUs do, and why they do nothing.
GENERATION, INFERENCE, TRAINING, SENDING = "generation", "inference", "training passes", "sending weights"
BETWEEN = "training, between the passes"
AGAIN, STAGE, EVALUATION = "steps run again", "stages before PPO", "evaluation"
WORK = (GENERATION, INFERENCE, TRAINING, BETWEEN, SENDING, STAGE, EVALUATION, AGAIN)
SAMPLES, OTHERS, TRAINERS = "wait for samples", "wait for other servers' samples", "wait for the trainers"
REWARDS, WEIGHTS, CHECKPOINT = "wait for reward functions", "wait for weights", "wait for a checkpoint"
EARLIER = "wait for a stage before PPO"
FORMING, AWAY, COORDINATING = "trainers start", "server starts or is away", "coordinator starts"
BEFORE, AFTER = "before the first iteration", "after the last iteration"
CUT, DOWN, REST = "cut off by a death", "start, restart and end of processes", "other"
IDLE = [SAMPLES, OTHERS, TRAINERS, REWARDS, WEIGHTS, CHECKPOINT, EARLIER, FORMING, AWAY, COORDINATING, BEFORE, AFTER]
IDLE += [CUT, DOWN, REST]


class Billed(NamedTuple):
    """GPUs that do the same: `gpus` of them, with the trainer rank or the vLLM server that they run, or both if these
    take turns. A process on CPUs counts as one. `product` is None there."""

    gpus: int
    product: str | None
    trainer: str | None = None
    rollout: str | None = None


def devices_of(job: RLHFJob, plan: Mapping[str, Any]) -> list[Billed]:
    """All GPUs of a job. `plan` is the content of plan.json."""
    devices: list[Billed] = []
    for group in job.spec.groups:
        each, product = max(1, group.gpu.per_pod), group.gpu.product
        ranks, servers = (
            [str(entry["name"]) for entry in plan.get(kind) or [] if entry.get("group") == group.name]
            for kind in ("trainers", "rollouts")
        )
        if group.colocated:
            devices += [Billed(1, product, rank, servers[i // each]) for i, rank in enumerate(ranks)]
        else:
            devices += [Billed(1, product, trainer=rank) for rank in ranks]
            devices += [Billed(each, product, rollout=server) for server in servers]
    return devices


# ---------------------------------------------------------------- times


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """The union of [start, end) spans, in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def take(free: Spans, wanted: Spans) -> tuple[float, Spans]:
    """The seconds of `free` that are in `wanted`, and the rest of `free`. Both are as `merged` returns them."""
    seconds, rest, first = 0.0, list[tuple[float, float]](), 0
    for start, end in free:
        while first < len(wanted) and wanted[first][1] <= start:
            first += 1
        at = first
        while at < len(wanted) and wanted[at][0] < end:
            low, high = max(start, wanted[at][0]), min(end, wanted[at][1])
            seconds += high - low
            if low > start:
                rest.append((start, low))
            start = high
            at += 1
        if end > start:
            rest.append((start, end))
    return seconds, rest


def both(one: Spans, other: Spans) -> Spans:
    """What is in both. Both are as `merged` returns them."""
    return take(one, take(one, other)[1])[1]


class Window(NamedTuple):
    """A part of a run, in seconds since the epoch. `iteration` is None outside the iterations. `rest` is why nothing
    is known of the remaining time."""

    start: float
    end: float
    iteration: int | None
    rest: str


# The beginning of each line of events.jsonl.
_EVENT = re.compile(r'\{"time": ?([0-9.]+), ?"process": ?"[^"]*", ?"event": ?"([a-z_.]+)"')
# The events that end what the trainers do before a step.
_NEXT = frozenset({"trainers.load", "trainers.replay", "trainers.lost", "weights.published", "iteration.finished"})
_READ = _NEXT | {"trainers.formed", "stage.finished", "coordinator.ready", "instance.health"}
_ENDED = frozenset({"job.succeeded", "job.failed", "coordinator.stopped"})
_PRESENT = frozenset({"healthy", "stale"})


@dataclass
class Life:
    """A coordinator's life, from its first event to its last one, in seconds since the epoch. `ended` says whether it
    came to an end of its own, and `stopped` whether somebody stopped it. `events` has those that the bill needs."""

    start: float
    end: float = 0.0
    ended: bool = False
    stopped: bool = False
    events: list[Document] = field(default_factory=list)


def read_lives(path: Path) -> list[Life]:
    """The lives in an events.jsonl. [] without such a file."""
    lives: list[Life] = []
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if (found := _EVENT.match(line)) is None:
                continue
            time, name = float(found[1]), found[2]
            if not lives or name == "coordinator.started":
                lives.append(Life(time))
            life = lives[-1]
            life.end = time
            life.ended = life.ended or name in _ENDED
            life.stopped = life.stopped or name == "coordinator.stopped"
            if name in _READ:
                with suppress(ValueError):  # a crash cut the line off
                    life.events.append(json.loads(line))
    return lives


@dataclass
class Told:
    """What events say: when the coordinator started, when trainers started or loaded, ran steps again, and worked in a
    stage before PPO, and by server when it was not there."""

    coordinating: Spans
    forming: Spans = field(default_factory=list)
    again: Spans = field(default_factory=list)
    stages: Spans = field(default_factory=list)
    away: dict[str, Spans] = field(default_factory=dict)


def told_by(life: Life) -> Told:
    ready = next((e["time"] for e in life.events if e["event"] == "coordinator.ready"), life.start)
    told = Told([(life.start, ready)])
    began: float | None = life.start if any(e["event"] == "trainers.formed" for e in life.events) else None
    absent: dict[str, float | None] = {}
    for number, event in enumerate(life.events):
        name, time = event["event"], event["time"]
        later = life.events[number + 1 :]
        if name == "trainers.lost":
            began = time if began is None else began
        elif name == "trainers.formed" and began is not None:
            told.forming.append((began, time))
            began = None
        elif name == "trainers.load" and event["stage"] != Stage.PPO:
            told.stages.append((time, _first(later, {*_NEXT, "stage.finished"}, life.end)))
        elif name in ("trainers.load", "trainers.replay"):
            spans = told.again if name == "trainers.replay" else told.forming
            spans.append((time, _first(later, _NEXT, life.end)))
        elif name == "instance.health":
            who, there = event["instance"], event["health"] in _PRESENT
            since = absent.get(who, life.start)
            if there and since is not None:
                told.away.setdefault(who, []).append((since, time))
            absent[who] = None if there else time if since is None else since
    if began is not None:
        told.forming.append((began, life.end))
    for who, since in absent.items():
        if since is not None:
            told.away.setdefault(who, []).append((since, life.end))
    for spans in (told.forming, told.again, told.stages, *told.away.values()):
        spans[:] = merged(spans)
    return told


def _first(events: Sequence[Document], names: Collection[str], otherwise: float) -> float:
    return float(next((event["time"] for event in events if event["event"] in names), otherwise))


def windows_of(life: Life, rows: Sequence[Document]) -> list[Window]:
    """The iterations of a life, and the time before and after them. `rows` has the rows of history.jsonl of the stage
    PPO, in the order in which they were written."""
    found: list[Window] = []
    reached = life.start
    for row in rows:
        end, seconds = row["time"], row["metrics"].get("iteration_seconds")
        if seconds is None or not reached < end <= life.end:
            continue
        # The iterations of a life follow each other.
        start = reached if found else min(end, max(reached, end - seconds))
        if start > reached:
            found.append(Window(reached, start, None, BEFORE))
        found.append(Window(start, end, row["step"], REST))
        reached = end
    if life.end > reached:
        rest = CUT if not life.ended else AFTER if found else BEFORE
        found.append(Window(reached, life.end, None, rest))
    return found


# ---------------------------------------------------------------- traces


@dataclass
class Traced:
    """The spans of a trace, in seconds since the epoch, by (process, lane); those of the coordinator by (process,
    name). `again` is the number of tokens that servers computed a second time."""

    spans: dict[tuple[str, str], Spans] = field(default_factory=dict)
    again: int = 0


def read_trace(trace: Mapping[str, Any]) -> Traced:
    events = [event for event in trace.get("traceEvents") or [] if isinstance(event, Mapping)]
    names = {e["pid"]: str(e["args"]["name"]) for e in events if e.get("name") == "process_name"}
    origin = float((trace.get("otherData") or {}).get("start_seconds") or 0.0)
    found, spans = Traced(), dict[tuple[str, str], Spans]()
    for event in events:
        if event.get("ph") != "X":
            continue
        process, start = names.get(event["pid"], ""), origin + event["ts"] / 1e6
        # The lane of an iteration that is drawn beside others has a number.
        key = process, str(event["name"] if process == COORDINATOR else event["cat"])
        spans.setdefault(key, []).append((start, start + event["dur"] / 1e6))
        found.again += int((event.get("args") or {}).get("prefilled_again") or 0)
    found.spans = {key: merged(each) for key, each in spans.items()}
    return found


class SeenSpans:
    """The spans in a window, from the traces that may have some of it."""

    def __init__(self, window: Window, traces: Sequence[Traced]) -> None:
        self._window, self._traces = window, traces
        keys = {key for trace in traces for key in trace.spans}
        self.samples = self._union(key for key in keys if key[0] != COORDINATOR and key[1] == "main")
        self.commands = self._union(key for key in keys if is_trainer(key[0]) and key[1] == "commands")

    def _union(self, keys: Iterable[tuple[str, str]]) -> Spans:
        low, high = self._window.start, self._window.end
        return merged(
            (max(low, start), min(high, end))
            for key in keys
            for trace in self._traces
            for start, end in trace.spans.get(key, ())
            if end > low and start < high
        )

    def of(self, process: str, *lanes: str) -> Spans:
        return self._union((process, lane) for lane in lanes)


def causes(device: Billed, seen: SeenSpans, told: Told) -> Iterator[tuple[str, Spans]]:
    """What GPUs did and what they waited for. The first that holds at a time counts."""
    if device.trainer is not None:
        yield TRAINING, seen.of(device.trainer, "actions")
        yield SENDING, seen.of(device.trainer, "sending")
        yield BETWEEN, seen.of(device.trainer, "commands")
    if device.rollout is not None:
        yield INFERENCE, seen.of(scorer_name(device.rollout), "main")
        yield GENERATION, seen.of(device.rollout, "main")
    yield COORDINATING, told.coordinating
    if device.trainer is not None:
        yield AGAIN, told.again
        yield STAGE, told.stages
        yield CHECKPOINT, seen.of(COORDINATOR, "checkpoint")
    yield FORMING, told.forming
    if device.rollout is not None:
        yield AWAY, told.away.get(device.rollout, [])
        yield EVALUATION, seen.of(COORDINATOR, "evaluation")
    yield TRAINERS, told.again
    yield EARLIER, told.stages
    moving = seen.of(COORDINATOR, "weights")
    yield AWAY, both(moving, merged(span for spans in told.away.values() for span in spans))
    yield WEIGHTS, moving
    yield SAMPLES if device.rollout is None else OTHERS, seen.samples
    yield REWARDS, seen.of(COORDINATOR, "reward function")
    if device.rollout is None:
        yield SAMPLES, seen.of(COORDINATOR, "waiting", "generation", "inference", "evaluation")
        yield BETWEEN, seen.of(COORDINATOR, "training")
    yield TRAINERS, merged([*seen.commands, *seen.of(COORDINATOR, "training", "waiting")])


def split(device: Billed, window: Window, seen: SeenSpans, told: Told) -> dict[str, float]:
    """The seconds of a window by what a device did. They add up to the window."""
    free, found = [(window.start, window.end)], dict[str, float]()
    for name, spans in causes(device, seen, told):
        seconds, free = take(free, spans)
        if seconds:
            found[name] = found.get(name, 0.0) + seconds
    if rest := sum(end - start for start, end in free):
        found[window.rest] = found.get(window.rest, 0.0) + rest
    return found


# ---------------------------------------------------------------- the bill


class Bill:
    """The bill of a run. `prices`: the price of a GPU for an hour, by product, in any currency. What is known of an
    iteration is kept, so that a second call of `document` reads new traces only."""

    def __init__(self, folder: RunFolder, prices: Mapping[str, float] | None = None) -> None:
        self._folder, self._prices = folder, prices or {}
        self._parts: dict[Window, list[dict[str, float]]] = {}
        # The windows of which later traces may have more.
        self._open: list[Window] = []
        self._again: dict[int, int] = {}
        self._traces: dict[int, Traced] = {}
        self._lock = threading.Lock()

    def document(self, newest: int | None = None) -> Document:
        """The bill, or that of the `newest` iterations. {} for a run without a manifest, a plan or an event.

        `seconds` are paid for `gpus` GPUs, or processes on CPUs. `parts` has (what, GPU seconds, whether it is work),
        and adds up to `seconds` times `gpus`. `lost_generation` are the GPU seconds of generation that went into
        episodes that are not trained, by their share of the tokens. Prices are None if that of a GPU is missing."""
        job, plan = self._folder.parsed_job(), self._folder.plan()
        lives = read_lives(self._folder.path / "events.jsonl")
        devices = devices_of(job, plan) if job is not None else []
        if not devices or not lives:
            return {}
        rows = [row for row in self._folder.rows() if row["stage"] == Stage.PPO.value and _is_time(row.get("time"))]
        windows = [(window, life) for life in lives for window in windows_of(life, rows)]
        ends = [number for number, (window, _) in enumerate(windows) if window.iteration is not None]
        first = ends[-newest] if newest is not None and len(ends) > newest else 0
        shown, told = windows[first:], {id(life): told_by(life) for life in lives}
        with self._lock:
            events = [told[id(life)] for _, life in shown]
            self._read([window for window, _ in shown], devices, events, plan.get("lag") or 0)
        paid = sum(window.end - window.start for window, _ in shown)
        down = 0.0 if first else max(0.0, self._elapsed(lives) - paid)
        gpus = sum(device.gpus for device in devices)
        sums, iterations = Counter({DOWN: down * gpus}), dict[int, Counter[str]]()
        for window, _ in shown:
            for device, parts in zip(devices, self._parts[window], strict=True):
                found = {name: device.gpus * seconds for name, seconds in parts.items()}
                sums.update(found)
                if window.iteration is not None:
                    iterations.setdefault(window.iteration, Counter()).update(found)
        hour = self._hour(devices)
        tokens, drawn, lost = _tokens(self._folder.path, iterations.keys())
        tokens["computed again"] = sum(self._again.get(iteration, 0) for iteration in iterations)
        predicted = (plan.get("prediction") or {}).get("iterationSeconds")
        return {
            "unit": "GPU" if all(device.product for device in devices) else "process",
            "gpus": gpus,
            "first_iteration": shown[0][0].iteration if first else None,
            "seconds": paid + down,
            "parts": [[name, sums[name], name in WORK] for name in (*WORK, *IDLE) if sums[name] > 0],
            "price": None if hour is None else hour * (paid + down) / 3600,
            "tokens": tokens,
            "lost_generation": sum(parts[GENERATION] * lost.get(number, 0.0) for number, parts in iterations.items()),
            "steps_again": sum(e["event"] == "trainers.replay" for life in lives for e in life.events),
            "planned_iteration": None if predicted is None else predicted * gpus,
            "iterations": [
                {
                    "iteration": iteration,
                    "gpu_seconds": parts.total(),
                    "price": None if hour is None else hour * parts.total() / gpus / 3600,
                    "samples": drawn.get(iteration, 0),
                    "parts": dict(parts),
                }
                for iteration, parts in sorted(iterations.items())
            ],
        }

    def _hour(self, devices: Sequence[Billed]) -> float | None:
        """The price of all GPUs for an hour."""
        whole = 0.0
        for device in devices:
            if (price := self._prices.get(device.product or "")) is None:
                return None
            whole += device.gpus * price
        return whole

    def _read(self, windows: Sequence[Window], devices: Sequence[Billed], told: Sequence[Told], lag: int) -> None:
        """Fill `_parts` for these windows."""
        for window in self._open:
            self._parts.pop(window, None)
        self._open.clear()
        latest = max(self._folder.trace_iterations(), default=0)
        # Between two iterations, traces of the next one have what ended in it.
        number, numbers = latest, list[int]()
        for window in reversed(windows):
            number = number if window.iteration is None else window.iteration
            numbers.append(number)
        for window, events, first in zip(windows, told, reversed(numbers), strict=True):
            if window in self._parts:
                continue
            # What is drawn ahead is in the trace of the iteration in which it ended.
            wanted = range(first, min(latest, first + lag + 1) + 1)
            for gone in [iteration for iteration in self._traces if iteration < first]:
                del self._traces[gone]
            for iteration in wanted:
                if iteration not in self._traces:
                    self._traces[iteration] = read_trace(self._folder.trace(iteration))
                    self._again[iteration] = self._traces[iteration].again
            seen = SeenSpans(window, [self._traces[iteration] for iteration in wanted])
            self._parts[window] = [split(device, window, seen, events) for device in devices]
            if first + lag + 1 > latest:
                self._open.append(window)

    def _elapsed(self, lives: Sequence[Life]) -> float:
        """The seconds for which processes ran. On one machine, the launcher counts them. In pods, they run on while the
        coordinator starts again, unless somebody stopped it."""
        known = self._folder.elapsed()
        if _is_time(known):
            return float(known)
        gaps = (after.start - before.end for before, after in pairwise(lives) if not before.stopped)
        return sum(life.end - life.start for life in lives) + sum(gaps)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float)


def _tokens(run_dir: Path, iterations: Collection[int]) -> tuple[dict[str, int], dict[int, int], dict[int, float]]:
    """The response tokens of these iterations by what became of them, the trained samples of each, and of each with
    episodes which share of what the model wrote is in episodes that are not trained."""
    tokens, samples = dict.fromkeys(("trained", "replaced", "drawn again", "of lost episodes"), 0), Counter[int]()
    lost: dict[int, float] = {}
    names = {Fate.TRAINED: "trained", Fate.EQUAL_REWARDS: "replaced", Fate.DISCARDED: "drawn again"}
    with suppress(StoreError, OSError):
        database = ReadOnlyDatabase(run_dir / "store.sqlite")
        for part in Outcomes(database).parts():
            if part.iteration in iterations:
                if name := names.get(part.outcome):
                    tokens[name] += int(part.rows["response_tokens"].sum())
                samples[part.iteration] += len(part.rows) if part.outcome is Fate.TRAINED else 0
        records = KeyValues(database)
        for iteration in iterations:
            found = records.get(counts_key(iteration)) or {}
            if gone := found.get("lost_tokens", 0):
                tokens["of lost episodes"] += gone
                lost[iteration] = gone / (gone + found["kept_tokens"])
    return tokens, dict(samples), lost


def sentences(bill: Mapping[str, Any]) -> list[str]:
    """What one wants to know first."""
    if not bill:
        return []
    total, unit = bill["seconds"] * bill["gpus"], f"{bill['unit']} seconds"
    work = sum(seconds for _, seconds, works in bill["parts"] if works)
    since = "" if bill["first_iteration"] is None else f" since iteration {bill['first_iteration']}"
    price = "" if bill["price"] is None else f", a price of {bill['price']:.2f}"
    kind = bill["unit"] if bill["gpus"] == 1 else {"GPU": "GPUs", "process": "processes"}[bill["unit"]]
    what = f"{bill['gpus']} {kind}"
    told = f"{what} for {bill['seconds']:,.0f} s{since}: {total:,.0f} {unit}{price}"
    found = [f"{told}; {work / total:.0%} of them worked."]
    samples = sum(one["samples"] for one in bill["iterations"])
    if samples:
        each = f"{total / samples:.3g} {unit}"
        cost = "" if bill["price"] is None else f" and {bill['price'] / samples:.3g}"
        found.append(f"A trained sample costs {each}{cost}.")
    tokens = bill["tokens"]
    twice = [
        f"{tokens['drawn again']:,} drawn again, because an iteration could not be trusted",
        f"{tokens['of lost episodes']:,} in episodes that were discarded or played again, about "
        f"{bill['lost_generation']:,.0f} {unit} of generation",
        f"{tokens['replaced']:,} drawn for prompts that dynamic sampling replaced",
        f"{tokens['computed again']:,} computed again, because their server or the coordinator was lost or they moved",
    ]
    if tokens["trained"]:
        more = "".join(f"; {text}" for text in twice if not text.startswith("0 "))
        found.append(f"Response tokens: {tokens['trained']:,} trained{more}.")
    if bill["steps_again"]:
        steps = "1 step" if bill["steps_again"] == 1 else f"{bill['steps_again']} steps"
        found.append(f"Trainers ran {steps} again after they were lost.")
    planned, measured = bill["planned_iteration"], [one["gpu_seconds"] for one in bill["iterations"]]
    if planned is not None and measured:
        mean = sum(measured) / len(measured)
        found.append(f"An iteration: {planned:,.4g} {unit} planned, {mean:,.4g} measured ({mean / planned - 1:+.0%}).")
    return found
