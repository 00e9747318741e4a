"""Measures training steps of actor and critic."""

from __future__ import annotations

from typing import Any

import torch

from gpu import device, models
from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import asked, by_clock, free, peak_bytes


def run(scale: Scale, report: Report) -> None:
    for name, head in models.HEADS.items():
        ours = _ours(scale, report, name, head)
        free()
        for what, deterministic, trained in (
            ("not compiled", True, {"compile": "Never"}),
            ("not deterministic", False, {}),
        ):
            tokens = _otherwise(scale, name, head, deterministic, trained)
            report.add(f"tokens, {name}, {what}", tokens, "/s", "as by default", ours["tokens"])
            free()
        _stock(scale, report, name, head, ours)
        free()


def _otherwise(scale: Scale, name: str, head: str, deterministic: bool, trained: dict[str, Any]) -> float:
    """The tokens per second with rows of equal length and other settings (`deterministic`, `trained`)."""
    with models.one_rank(deterministic) as groups:
        engine = models.engine(groups, scale, scale.layers, [name], **trained)
        actions = models.in_turn(name, scale.micro_batches)
        work = models.micro_batches(scale, head, True, scale.config["vocab_size"])
        seconds = by_clock(lambda: engine.run(actions, {name: work}, 1, lambda *_: None), scale.repeats, warm=2)
    return scale.micro_batches * scale.sequences * scale.tokens / seconds


def _ours(scale: Scale, report: Report, name: str, head: str) -> dict[str, Any]:
    """The tokens per second with rows of equal length, and the kernel launches of a step."""
    vocabulary, found = scale.config["vocab_size"], {}
    with models.one_rank() as groups:
        engine = models.engine(groups, scale, scale.layers, [name])
        actions = models.in_turn(name, scale.micro_batches)
        for equal in (True, False):
            work = models.micro_batches(scale, head, equal, vocabulary)

            def step(work: Any = work) -> None:
                engine.run(actions, {name: work}, 1, lambda model, applied: None)

            seconds = by_clock(step, scale.repeats, warm=2)
            sizes = [n for i in range(scale.micro_batches) for n in models.lengths(scale, scale.sequences, equal, i)]
            flops = models.training_flops(scale, scale.layers, head, sizes) / seconds / 1e12
            what = f"{name}, {'equal' if equal else 'unlike'} lengths"
            report.add(f"MFU, {what}", flops / report.device[device.FLOPS], "", "target", 0.45)
            if equal:
                found = {"tokens": sum(sizes) / seconds, **asked(step)}
                found["memory"] = peak_bytes(step)
            else:
                report.add(f"tokens, {what}", sum(sizes) / seconds, "/s", "equal lengths", found["tokens"])
    return found


def _stock(scale: Scale, report: Report, name: str, head: str, ours: dict[str, Any]) -> None:
    step, tool = models.stock_step(scale, scale.layers, head)
    seconds = by_clock(step, scale.repeats, warm=3)
    note = f"{scale.layers} layers of {scale.name}; the anchor has no float32 weights"
    tokens = scale.micro_batches * scale.sequences * scale.tokens
    report.add(f"tokens, {name}, equal lengths", ours["tokens"], "/s", tool, tokens / seconds, note)
    theirs = asked(step)
    passes = scale.micro_batches * scale.layers
    for key in ("launches", "synchronisations", "h2d", "d2h"):
        share = passes if key == "launches" else scale.micro_batches
        unit = "a layer and micro-batch" if key == "launches" else "a micro-batch"
        report.add(f"{key}, {name}", ours[key] / share, unit, tool, theirs[key] / share, "step included")
    gib = 2**30
    report.add(f"peak memory, {name}", ours["memory"] / gib, "GiB", tool, peak_bytes(step) / gib, "above the weights")
    torch.cuda.synchronize()
