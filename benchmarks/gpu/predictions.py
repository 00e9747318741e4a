"""Compares predictions with training steps of a whole model. The predictions are the passes that `dovetail profile`
measures of one layer, and those of the planner's formula."""

from __future__ import annotations

import statistics

import torch

from dovetail.coordinator.schedules.stage_times import stage_times
from dovetail.gpus.gpu_products import UnknownProduct, gpu
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.planner.memory import ITEMSIZE
from dovetail.planner.seconds import MEMORY, forward
from dovetail.tools.one_line import product_label
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
            # The profile measures layers that are not compiled.
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
        try:
            formula = _formula(scale, head)
        except UnknownProduct as problem:
            report.skip(f"{name}'s passes, planner's formula", str(problem))
        else:
            note = "docs/planner.md"
            report.add(f"{name}'s passes, planner's formula", 1e3 * formula, "ms", "measured", 1e3 * measured, note)
    report.add("median error", statistics.median(errors), "", "target", 0.1, "of passes, without the optimizer's step")


def _formula(scale: Scale, head: Head) -> float:
    """The seconds of a mini-batch's passes by the planner's formula. Raises UnknownProduct."""
    here = gpu(product_label(torch.cuda.get_device_name(0)))
    shape = ModelShape.of({"model_type": "llama", **scale.shape(scale.few_layers)})
    passes = 3 * scale.micro_batches * forward(shape, head, scale.sequences * scale.tokens, scale.tokens / 2, here)
    added = (ITEMSIZE[here.dtype] + 8) * shape.parameters(head) / (MEMORY * here.memory_bandwidth)
    return passes + (scale.micro_batches - 1) * added
