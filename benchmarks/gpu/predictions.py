"""Passes that `dovetail profile` measured of one layer, against training steps of a whole model."""

from __future__ import annotations

import statistics

import torch

from dovetail.coordinator.schedules.stage_times import stage_times
from dovetail.trainer.profile.pass_times import measure_model
from gpu import models
from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import by_clock, free


def run(scale: Scale, report: Report) -> None:
    sizes = sorted({max(1, scale.sequences // 2), scale.sequences})
    vocabulary = scale.config["vocab_size"]
    errors = []
    for name, head in models.HEADS.items():
        ref = models.reference(scale, scale.few_layers, head)
        with models.one_rank() as groups:
            repeats = max(3, scale.repeats)
            times = measure_model(ref, sizes, scale.tokens, torch.device("cuda"), torch.bfloat16, repeats)
            free()
            # The profile is of layers as they are.
            engine = models.engine(groups, scale, scale.few_layers, [name], compile="Never")
            actions = models.in_turn(name, scale.micro_batches)
            work = models.micro_batches(scale, head, True, vocabulary)
            measured = by_clock(lambda a=actions, w=work, n=name, e=engine: e.run(a, {n: w}), scale.repeats, warm=2)
            del engine
        free()
        one = stage_times(name, times, 1, scale.sequences)
        predicted = scale.micro_batches * float(one["F"][0] + one["B"][0])
        errors.append(abs(predicted / measured - 1))
        report.add(f"{name}'s passes, predicted", 1e3 * predicted, "ms", "measured", 1e3 * measured)
    report.add("median error", statistics.median(errors), "", "target", 0.1, "of passes, without the optimizer's step")
