"""Compares trainer ranks that share the GPU, as two pipeline stages and as two shards, with one rank.

It shows that the executor's messages, split models and reductions are right with real kernels. It says nothing about
the speed of several GPUs. NCCL refuses two ranks on one GPU, so all their messages go through host memory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from dovetail.coordinator.schedules.step_commands import serial_1f1b
from dovetail.manifest.types import Parallelism
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.engine.engine import choose_algorithms
from gpu import models
from gpu.report import Report
from gpu.scale import SHAPES, Scale

LAYOUTS = {"one rank": Parallelism(), "two stages": Parallelism(pp=2), "two shards": Parallelism(dp=2)}
STEPS = 3
# In bfloat16 a sum over ranks may be rounded differently from a sum over micro-batches.
TOLERANCE = 0.01


def run(scale: Scale, report: Report) -> None:
    if scale.name != "tiny":
        scale = replace(scale, name="small", config=SHAPES["small"], layers=4, sequences=2, tokens=256, micro_batches=4)
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        found = {what: together(scale, layout, Path(folder, what)) for what, layout in LAYOUTS.items()}
    alone = found.pop("one rank")
    for what, each in found.items():
        worst = 0.0
        for name, number in each["numbers"].items():
            beside = alone["numbers"][name]
            report.add(f"{name}, {what}", number, "", "one rank", beside)
            worst = max(worst, abs(number - beside) / max(abs(beside), 1e-9))
        report.add(f"largest difference, {what}", worst, "", "limit", TOLERANCE, "of losses and norms")
        note = f"of both models, {scale.layers} layers of {scale.name}; messages go through host memory"
        report.add(f"step, {what}", 1e3 * each["seconds"], "ms", "one rank", 1e3 * alone["seconds"], note)


def together(scale: Scale, layout: Parallelism, folder: Path) -> dict[str, Any]:
    """The results of rank 0 of the layout. Raises RuntimeError if a rank failed."""
    folder.mkdir()
    port, world = models.free_port(), layout.pp * layout.dp
    # Forking is possible because this process has not used CUDA.
    context = get_context("fork")
    ranks = [context.Process(target=_rank, args=(n, world, layout, scale, port, folder)) for n in range(world)]
    for each in ranks:
        each.start()
    while any(each.is_alive() for each in ranks):
        if any(each.exitcode for each in ranks):
            for each in ranks:
                each.kill()
        time.sleep(0.02)
    if failed := [number for number, each in enumerate(ranks) if each.exitcode]:
        raise RuntimeError(f"ranks {failed} of {layout} failed")
    found: dict[str, Any] = json.loads((folder / "rank-0.json").read_text())
    return found


def _rank(number: int, world: int, layout: Parallelism, scale: Scale, port: int, folder: Path) -> None:
    status = 1
    torch.set_num_threads(torch.get_num_threads())
    try:
        found = _train(number, world, layout, scale, port)
        (folder / f"rank-{number}.json").write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, because threads of torch's backends may wait there.
    os._exit(status)


def _train(number: int, world: int, layout: Parallelism, scale: Scale, port: int) -> dict[str, Any]:
    """The losses and gradient norms of each step, and the seconds of the last one."""
    layouts = dict.fromkeys(models.HEADS, layout)
    groups = Groups.form("127.0.0.1", port, number, world, layouts, models.DEADLINE, local_rank=0)
    if groups.staged != (world > 1):
        raise RuntimeError("ranks that share the GPU do not send through host memory")
    choose_algorithms(True)
    engine = models.engine(groups, scale, scale.layers, list(models.HEADS), compile="Never")
    torch.manual_seed(0)  # the same samples on all ranks
    work = {
        name: models.micro_batches(scale, head, False, scale.config["vocab_size"])[groups.of(name).dp_rank :: layout.dp]
        for name, head in models.HEADS.items()
    }
    counts = {name: len(batches) for name, batches in work.items()}
    actions = serial_1f1b(layouts, counts, list(layouts))[number]
    numbers: dict[str, float] = {}
    seconds = 0.0
    for step in range(1, STEPS + 1):
        groups.barrier()
        start = time.perf_counter()
        stats = engine.run(actions, work)
        norms = {name: engine.optimizer_step(name)["grad_norm"] for name in models.HEADS}
        torch.cuda.synchronize()
        groups.barrier()
        seconds = time.perf_counter() - start
        for name in models.HEADS:
            numbers[f"loss of {name}, step {step}"] = stats[name]["loss"]
            numbers[f"gradient norm of {name}, step {step}"] = norms[name]
    groups.close()
    return {"numbers": numbers, "seconds": seconds}
