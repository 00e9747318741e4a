"""Shows the progress of a running job from its status documents: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dovetail.coordinator.reporting.time_left import position
from dovetail.manifest.types import RLHFJobSpec, Stage

_SHOWN = {
    Stage.SFT: (("loss", "loss", "{:.3f}"),),
    Stage.REWARD: (("loss", "loss", "{:.3f}"), ("accuracy", "accuracy", "{:.1%}")),
    Stage.DPO: (("loss", "loss", "{:.3f}"), ("accuracy", "accuracy", "{:.1%}"), ("margin", "margin", "{:.3f}")),
    Stage.PPO: (("reward", "reward", "{:.3f}"), ("kl", "KL", "{:.3f}"), ("samples_per_second", "samples/s", "{:.1f}")),
}


def describe_metrics(stage: Stage, metrics: Mapping[str, Any]) -> str:
    """The main metrics of a stage that exist, for example 'reward 1.204 ± 0.031, KL 0.210, samples/s 14.2'."""
    parts = []
    for key, label, form in _SHOWN[stage]:
        value = metrics.get(key)
        if isinstance(value, int | float):
            text = f"{label} {form.format(round(value, 6) + 0.0)}"
            spread = metrics.get(f"{key}_ci95")
            if isinstance(spread, int | float):
                text += f" ± {form.format(spread)}"
            parts.append(text)
    return ", ".join(parts)


def labels(spec: RLHFJobSpec) -> dict[Stage, str]:
    """The names of the stages for users. DPO has the name of its loss, and PPO that of its method."""
    return {
        Stage.SFT: "SFT",
        Stage.REWARD: "Reward model",
        Stage.DPO: spec.dpo.loss,
        Stage.PPO: spec.ppo.method,
    }


def time_left(status: Mapping[str, Any]) -> str:
    """The time left as text, such as 'about 3 min left'. If later stages are unknown, it is 'about 40 s left in this
    stage'. Empty if nothing is known."""
    whole, stage = status.get("seconds_left"), status.get("stage_seconds_left")
    if isinstance(whole, int | float):
        return f"about {roughly(whole)} left"
    return f"about {roughly(stage)} left in this stage" if isinstance(stage, int | float) else ""


def roughly(seconds: float) -> str:
    """A rounded duration, such as '40 s', '3 min' or '2 h 10 min'."""
    if seconds < 90:
        return f"{max(1, round(seconds / 5) * 5 if seconds > 10 else round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class RunNews:
    """Says what is new in status documents: a message, an evaluation, and each verdict on iterations when it begins and
    when it ends."""

    def __init__(self) -> None:
        self._message = ""
        self._verdicts: set[str] = set()
        self._iteration = 0
        self._evaluation: int | None = None

    def lines(self, status: Mapping[str, Any]) -> list[str]:
        """Lines about what is new in a status document."""
        before, self._message = self._message, str(status.get("message") or "")
        told = [self._message] if self._message not in ("", before) else []
        return [*told, *self._evaluated(status), *self._health(status)]

    def _health(self, status: Mapping[str, Any]) -> list[str]:
        health = status.get("health") or {}
        if not health or health.get("iteration", 0) <= self._iteration:
            return []
        self._iteration = health["iteration"]
        verdicts = {v["reason"]: v["message"] for v in health.get("verdicts") or []}
        new = [
            f"Warning: iteration {self._iteration} is unhealthy ({reason}): {message}"
            for reason, message in verdicts.items()
            if reason not in self._verdicts
        ]
        over = [f"iteration {self._iteration}: no longer {reason}" for reason in sorted(self._verdicts - set(verdicts))]
        self._verdicts = set(verdicts)
        return new + over

    def _evaluated(self, status: Mapping[str, Any]) -> list[str]:
        found = status.get("evaluation") or {}
        iteration = found.get("iteration")
        if iteration is None or iteration == self._evaluation:
            return []
        self._evaluation = iteration
        when = f"after iteration {iteration}" if iteration else "before the first iteration"
        parts = [f"{name} {value['mean']:.4g} ± {value['ci95']:.2g}" for name, value in found["metrics"].items()]
        started = found.get("before_sft") or {}
        parts = [
            f"{part} (before SFT {started[name]['mean']:.4g})" if name in started else part
            for name, part in zip(found["metrics"], parts, strict=True)
        ]
        best = found.get("best") or {}
        if best.get("iteration") == iteration and iteration:
            parts[-1] += f"; the highest {found['metric']} so far"
        return [f"evaluation {when}: {', '.join(parts)}"]


class Display(Protocol):
    """Shows a run. `update` takes status documents, `tell` takes one-line events. Both may be called from any thread.
    `finish` is called with the summary when the job has succeeded, because the last status may be older than that."""

    def update(self, status: Mapping[str, Any]) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...
    def tell(self, line: str) -> None: ...
    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_display(spec: RLHFJobSpec, console: Console) -> Display:
    """Bars if `console` is a terminal, lines if not."""
    return Bars(spec, console) if console.is_terminal else Lines(spec, console)


class Bars:
    """One bar for each stage, and one for the samples of the current iteration."""

    def __init__(self, spec: RLHFJobSpec, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[metrics]}", style="cyan"),
            console=console,
        )
        self._bars: dict[Stage, TaskID] = {}
        names = labels(spec)
        for stage in spec.stages:
            total = spec.ppo.iterations if stage is Stage.PPO else spec.supervised(stage).steps
            self._bars[stage] = self._progress.add_task(names[stage], total=total, start=False, metrics="", left="")
        self._samples: TaskID | None = None
        if Stage.PPO in spec.stages:
            self._samples = self._progress.add_task(
                "  samples", total=None, start=False, visible=False, metrics="", left=""
            )
        self._message = self._progress.add_task("starting", total=None, metrics="", left="", start=False, visible=False)
        self._current: Stage | None = None
        self._news = RunNews()

    def __enter__(self) -> Bars:
        self._progress.start()
        self.tell("starting the coordinator, trainers, vLLM servers and scorers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._samples is not None:
            self._progress.update(self._samples, visible=False)
        self._progress.stop()

    def tell(self, line: str) -> None:
        self._progress.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(line)}", highlight=False)

    def update(self, status: Mapping[str, Any]) -> None:
        for line in self._news.lines(status):
            self.tell(line)
        place = position(status)
        if place is None or place[0] not in self._bars:
            return
        stage, done, total = place
        if stage is not self._current:
            self._enter(stage)
        bar = self._bars[stage]
        if total:
            self._progress.update(bar, total=total)
        self._progress.update(bar, completed=done, left=time_left(status))
        text = describe_metrics(stage, status.get("metrics") or {})
        if text:
            self._progress.update(bar, metrics=text)
        if stage is Stage.PPO and self._samples is not None:
            self._show_samples(status)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show every stage as complete. The length of a stage that ended early is the number of its steps."""
        progress = summary.get("progress") or {}
        for stage, bar in self._bars.items():
            if progress.get("stage") == stage.value and progress.get("done"):
                self._progress.update(bar, total=int(progress["done"]))
            self._complete(bar)

    def _enter(self, stage: Stage) -> None:
        """Show that a stage has begun. Stages run in order, so all stages before it are complete. If the run was
        resumed, their bars may not have moved yet."""
        for earlier, bar in self._bars.items():
            if earlier is stage:
                break
            self._complete(bar)
        self._progress.start_task(self._bars[stage])
        self._current = stage

    def _complete(self, bar: TaskID) -> None:
        task = next(t for t in self._progress.tasks if t.id == bar)
        self._progress.start_task(bar)
        whole = task.total or task.completed
        self._progress.update(bar, completed=whole, total=whole, left="")
        self._progress.stop_task(bar)

    def _show_samples(self, status: Mapping[str, Any]) -> None:
        assert self._samples is not None
        total = int(status.get("samples_total") or 0)
        phase = status.get("phase") or ""
        self._progress.update(
            self._samples,
            visible=bool(total),
            total=total or None,
            completed=int(status.get("samples_done") or 0),
            metrics=f"iteration {status.get('iteration', 0)}: {phase}" if phase else "",
        )


class Lines:
    """Prints a line when something changes. For steps it prints at most one line every few seconds."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        console: Console,
        every_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._labels = labels(spec)
        self._console = console
        self._every = every_seconds
        self._clock = clock
        self._shown: tuple[Stage, int, int] | None = None
        self._shown_at = 0.0
        self._news = RunNews()

    def __enter__(self) -> Lines:
        self.tell("starting the coordinator, trainers, vLLM servers and scorers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def tell(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def update(self, status: Mapping[str, Any]) -> None:
        for line in self._news.lines(status):
            self.tell(line)
        place = position(status)
        if place is None or place == self._shown:
            return
        stage, done, total = place
        new_stage = self._shown is None or self._shown[0] is not stage
        # Each iteration gets a line. The steps of other stages come too fast for that.
        due = stage is Stage.PPO or self._clock() - self._shown_at >= self._every or (total > 0 and done >= total)
        if not new_stage and not due:
            return
        self._shown, self._shown_at = place, self._clock()
        metrics = describe_metrics(stage, status.get("metrics") or {}) if done else ""
        parts = [part for part in (metrics, time_left(status) if done < total else "") if part]
        self._show(stage, done, total, parts)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the last step if no status came after it."""
        progress = summary.get("progress") or {}
        with contextlib.suppress(ValueError):
            stage, done = Stage(progress.get("stage") or ""), int(progress.get("done") or 0)
            if done and (self._shown is None or self._shown[:2] != (stage, done)):
                self._show(stage, done, done, [])

    def _show(self, stage: Stage, done: int, total: int, parts: Sequence[str]) -> None:
        unit = "iteration" if stage is Stage.PPO else "step"
        told = f": {'; '.join(parts)}" if parts else ""
        self.tell(f"{self._labels[stage]}: {unit} {done} of {total or '?'}{told}")
