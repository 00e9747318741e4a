"""Memory of the null GPU as torch's allocators see it."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from programs.trainer import counts
from worker import PATIENCE, Place

from dovetail.coordinator.schedules.step_commands import serial_1f1b
from dovetail.coordinator.schedules.stored_schedule import StoredSchedule, encode
from dovetail.coordinator.schedules.training_schedule import shared_layouts
from dovetail.manifest.types import Parallelism, RLHFJobSpec, ScratchModel
from dovetail.models import build
from dovetail.models.layers import predictions
from dovetail.models.layers.predictions import Predictions, Vocabulary, predict
from dovetail.protocol.budgets import LOGPROB_CHUNK_BYTES, SCORER_TOKENS
from dovetail.protocol.messages import Load, ModelRef, Step
from dovetail.protocol.plan import Layout
from dovetail.rollout.scoring.forward_passes import ModelScorer
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from dovetail.trainer.algorithms.policy import load_loss
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.engine import engine_model
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.steps.ppo_step import prepare_step
from dovetail.trainer.steps.step_context import Context, SpanRecorder

GIB = 2**30


def accounts(place: Place, conf: str) -> dict[str, Any]:
    """What is allocated, reserved and free, in GiB, after tensors of 1, 2 and 3 GiB, of which the first went before the
    others; then whether 100 GiB are refused, and whether 40 GiB of page-locked memory are zeros after zeros came."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = conf

    def made(gib: int) -> torch.Tensor:
        return torch.zeros(gib * GIB, dtype=torch.uint8, device="cuda")

    made(1)
    kept = [made(2), made(3)]
    found = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]]
    host = torch.empty(40 * GIB, dtype=torch.uint8, pin_memory=True)
    host[:: 10 * GIB].fill_(1)
    host.copy_(torch.zeros(1, dtype=torch.uint8, device="cuda").expand(40 * GIB).contiguous())
    try:
        made(100)
    except torch.OutOfMemoryError:
        refused = True
    del kept
    return {"gib": [size / GIB for size in found], "refused": refused, "host": int(host[:: 10 * GIB].sum())}


def words(place: Place, rows: int, hidden: int, vocabulary: int) -> dict[str, int]:
    """Of log-probabilities and entropies at `rows` positions, and of their gradients: bytes at the peak, without what
    comes in and the weight's gradient; by chunks, as the trainer's last stage computes them, and from the whole
    logits."""
    found = {}
    for name, chunk in (("chunks", LOGPROB_CHUNK_BYTES), ("whole", 4 * rows * vocabulary)):
        states = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda").requires_grad_()
        weight = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device="cuda").requires_grad_()
        tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with patch.object(predictions, "LOGPROB_CHUNK_BYTES", chunk):
            said = predict(states, Vocabulary(weight), Predictions(tokens, 0.9, "value"))
        said.logprobs.sum().backward()
        found[name] = torch.cuda.max_memory_allocated() - before - weight.nbytes
        del states, weight, said
    return found


def train(
    place: Place,
    models: dict[str, dict[str, Any]],
    spec: dict[str, Any],
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    rows: int = 1,
    prompt: int = 512,
    response: int = 512,
    micro_batches: int = 2,
    mini_batches: int = 2,
    schedule: list[str] | None = None,
    reverse: bool = False,
    critic_pp: int = 0,
    chunks: int = 1,
    recompute: bool = False,
    zero3: bool = False,
    shared: bool = False,
    expandable: bool = True,
    history: bool = False,
) -> dict[str, Any]:
    """Peak memory of two PPO iterations on samples of full length: `mini_batches` optimizer steps of `micro_batches`
    of `rows` samples on each data-parallel rank. `models`: Hugging Face configurations by model. `shared`: the critic
    is a head on the actor. `schedule`: letters by rank, without it 1F1B, actor, then critic. `critic_pp`: the critic's
    stages, if they are fewer than the actor's on the same ranks. `chunks`: the stages of each model on a rank.

    Returns bytes: `loaded` before the first pass, `allocated` and `reserved` at the peaks, `pinned` of the host."""
    os.environ |= {"NULLGPU_MEMORY": "256", "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    engine_model.fill = lambda *_: None  # uninitialised is as large
    layouts: dict[str, Parallelism] = {
        name: Layout(pp=pp, dp=dp, tp=tp, reverse=reverse and name == "critic", chunks=chunks) for name in models
    }
    if critic_pp:
        critic = Parallelism(pp=critic_pp, dp=dp * pp // critic_pp, tp=tp)
        layouts = dict(shared_layouts({**layouts, "critic": critic}, reverse))
    groups = Groups.form("127.0.0.1", place.port, place.rank, place.world, layouts, PATIENCE)
    samples = rows * micro_batches * dp * mini_batches
    given = {"groups": [{"name": "t", "roles": ["trainer", "rollout"], "gpu": {"product": "A100-SXM4-80GB"}}], **spec}
    ppo = {"mini_batch_size": samples // mini_batches, "micro_batch_size": rows, **given.pop("ppo", {})}
    job = RLHFJobSpec.model_validate({**given, "ppo": ppo})
    timeline = SpanRecorder("trainer")
    engine = Engine(job, groups, timeline.record)
    refs = {
        name: ModelRef(
            head="value" if name == "critic" else "lm+value" if shared else "lm",
            scratch=ScratchModel(architecture=config["model_type"], config=_without_type(config)),
            seed=1,
        )
        for name, config in models.items()
    }
    if history:
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="python")
    engine.load(
        Load(
            id="load",
            stage="ppo",
            models=refs,
            total_steps=4 * mini_batches,
            checkpoint=None,
            recompute=list(models) if recompute else [],
            zero3=list(models) if zero3 else [],
        )
    )
    loaded = torch.cuda.memory_allocated()
    arrays = _samples(samples, prompt, response)
    context = Context(job, groups, engine, lambda _, _part: arrays, timeline, load_loss(job.ppo), None)
    each = {name: micro_batches * dp // layout.dp for name, layout in layouts.items()}
    words = schedule or encode(serial_1f1b(layouts, each, list(models)))
    actions = StoredSchedule("", 1, words).actions()
    for number in (1, 2):
        run = prepare_step(context, Step(id=str(number), stage="ppo", step=number, batch="b", actions=actions))
        run()
        engine.settle()
    found = {
        "loaded": loaded,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "pinned": counts()["pinned_bytes"],
        "communicators": counts()["communicators"],
    }
    if history:
        torch.cuda.memory._dump_snapshot(str(place.folder / f"snapshot-{place.rank}.pickle"))
    groups.close()
    return found


def score(place: Place, models: dict[str, dict[str, Any]], prompt: int, response: int, stages: int) -> dict[str, Any]:
    """Peak memory of a scorer that holds these models on one device, or on as many as `stages`, scores 64 samples
    of full length with each and gets new weights of the critic: of the device where most is reserved."""
    os.environ |= {"NULLGPU_MEMORY": "256", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    build.fill = lambda *_: None
    scorer = ModelScorer(
        [f"cuda:{k}" for k in range(stages)], torch.bfloat16, SCORER_TOKENS, split=dict.fromkeys(models, stages)
    )
    refs = {
        name: ModelRef(
            head="lm" if name == "reference" else "value",
            scratch=ScratchModel(architecture=config["model_type"], config=_without_type(config)),
            seed=1,
        )
        for name, config in models.items()
    }
    scorer.load(refs)
    given = _samples(64, prompt, response)
    names = ("tokens", "prompt_lengths", "response_lengths")
    scorer.score(models, SamplesToScore.read({name: given[name] for name in names}))
    if "critic" in models:
        sent = scorer.require("critic").named_parameters()
        scorer.apply_weights(scorer.stage_weights((name, weight.data) for name, weight in sent), 1)
    most = max(range(stages), key=torch.cuda.max_memory_reserved)
    return {
        "allocated": torch.cuda.max_memory_allocated(most),
        "reserved": torch.cuda.max_memory_reserved(most),
        "pinned": counts()["pinned_bytes"],
    }


def _samples(count: int, prompt: int, response: int) -> dict[str, Any]:
    """Samples that all have full length."""
    table = np.zeros((count, response), np.float32)
    return {
        "tokens": np.zeros((count, prompt + response), np.int32),
        "prompt_lengths": np.full(count, prompt, np.int32),
        "response_lengths": np.full(count, response, np.int32),
        "rollout_logprobs": table,
        "ref_logprobs": table,
        "values": table,
        "scores": np.zeros(count, np.float32),
        "groups": np.arange(count, dtype=np.int32),
        "finished": np.ones(count, np.uint8),
    }


def _without_type(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "model_type"}
