"""Measures a whole PPO iteration in one process. The rollouts' data is made up. Everything else is the trainer's and
the scorer's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.models.transfer import message_bytes, pack_into
from dovetail.protocol.messages import Load, Step
from dovetail.protocol.weights.buckets import GPU_BUCKET_BYTES, TensorSpec, bucket_specs, plan_buckets
from dovetail.protocol.wire import Arrays, pack
from dovetail.trainer.command_runner import CommandRunner
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.rank.coordinator_client import RankProcess
from gpu import device, models
from gpu.report import Report
from gpu.scale import Scale
from gpu.scoring import samples, scorer, stock_forward
from gpu.timing import by_clock, free

MODELS = ("actor", "critic")


def run(scale: Scale, report: Report) -> None:
    layers, count = scale.few_layers, scale.samples
    given = samples(scale, count, 4, False)
    tokens = int(given.lengths.sum())
    inference, batch = _inference(scale, layers, given)
    free()
    training, weights, size = _training(scale, layers, pack(batch), count)
    free()
    forward, step = _stock(scale, layers, tokens, count)
    note = f"{count} samples, {tokens} tokens, {layers} layers; the samples are made up"
    found = {
        "inference": (inference, "Hugging Face, one forward a model", forward),
        "training": (training, "Hugging Face, torch.compile, fused AdamW", step),
        "weights": (weights, "bytes over bandwidth", 3 * size / report.device[device.MEMORY] / 1e9),
    }
    for name, (seconds, anchor, beside) in found.items():
        report.add(name, 1e3 * seconds, "ms", anchor, 1e3 * beside, note)
    ours, theirs = (sum(each[k] for each in found.values()) for k in (0, 2))  # type: ignore[misc]
    report.add("iteration", 1e3 * ours, "ms", "sum of the above", 1e3 * theirs, note)


def _inference(scale: Scale, layers: int, given: Any) -> tuple[float, Arrays]:
    """The seconds of inference, and the batch that the trainer gets."""
    names = ["reference", "reward", "critic"]
    made = scorer(scale, layers, ("reference", "reward", "critic"))
    return by_clock(lambda: made.score(names, given), scale.repeats), _batch(given, made.score(names, given))


def _training(scale: Scale, layers: int, batch: bytes, count: int) -> tuple[float, float, int]:
    """The seconds of the optimizer steps, the seconds of packing the actor's weights, and the bytes of these
    weights."""
    with models.one_rank() as groups:
        runner = _runner(scale, layers, groups, batch, count)
        number = iter(range(1, 1000))

        def train() -> None:
            result = runner.execute(_step(scale, next(number), count))
            if not result.ok:
                raise RuntimeError(result.error)

        training = by_clock(train, scale.repeats)
        tensors = dict(runner.engine.weights("actor"))
        weights = by_clock(_packing(tensors), scale.repeats)
        runner.close()
        return training, weights, sum(tensor.nbytes for tensor in tensors.values())


def _batch(given: Any, scored: Arrays) -> Arrays:
    inside = np.arange(scored["ref_logprobs"].shape[1]) < given.responses[:, None]
    shape = inside.shape
    return {
        "tokens": given.tokens.astype(np.int32),
        "prompt_lengths": given.prompts.astype(np.int32),
        "response_lengths": given.responses.astype(np.int32),
        "rollout_logprobs": np.where(inside, -1.0, 0.0).astype(np.float32),
        "ref_logprobs": scored["ref_logprobs"].astype(np.float32).reshape(shape),
        "values": scored["values"].astype(np.float32).reshape(shape),
        "scores": scored["scores"].astype(np.float32),
        "groups": np.arange(len(given.prompts), dtype=np.int32),
        "finished": np.ones(len(given.prompts), np.uint8),
    }


class _Batches:
    """The part of the coordinator's client that a step uses."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def batch(self, key: str, part: Any = None) -> bytes:
        return self._data


def _runner(scale: Scale, layers: int, groups: Groups, data: bytes, count: int) -> CommandRunner:
    spec = {
        "groups": [{"name": "t", "roles": ["trainer", "rollout"]}],
        "ppo": {"globalBatchSize": count, "miniBatchSize": count, "microBatchSize": min(scale.sequences, count)},
        "trainer": {"compile": "Auto" if scale.compiles else "Never"},
        "generation": {"maxTokens": 2 * scale.tokens},
    }
    client: Any = _Batches(data)
    made = CommandRunner(
        RankProcess("trainer-0", client, lambda *_, **__: None), RLHFJobSpec.model_validate(spec), groups, {}
    )
    refs = {name: models.reference(scale, layers, models.HEADS[name]) for name in MODELS}
    with models.random_weights():
        result = made.execute(Load(id="load", stage=Stage.PPO, models=refs, total_steps=1000))
    if not result.ok:
        raise RuntimeError(result.error)
    return made


def _step(scale: Scale, number: int, count: int) -> Step:
    micro = count // min(scale.sequences, count)
    actions = [action for name in MODELS for action in models.in_turn(name, micro)]
    return Step(id=f"step/{number}", stage=Stage.PPO, step=number, batch="made up", actions=[actions])


def _packing(tensors: dict[str, torch.Tensor]) -> Any:
    """Pack all buckets of the actor as the sender packs them."""
    specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]
    buckets = plan_buckets(specs, GPU_BUCKET_BYTES)
    message = torch.empty(max(map(message_bytes, buckets)), dtype=torch.uint8, device="cuda")

    def work() -> None:
        for bucket in buckets:
            named = [tensors[spec.name] for spec in bucket_specs(bucket)]
            pack_into(message[: message_bytes(bucket)], bucket, named)

    return work


def _stock(scale: Scale, layers: int, tokens: int, count: int) -> tuple[float, float]:
    """The seconds of as many tokens with stock tools. These are the forward passes of three models, and a step of
    two."""
    forward = {head: tokens / stock_forward(scale, layers, head, count) for head in ("lm", "value")}
    free()
    trained = 0.0
    for head in ("lm", "value"):
        step, _ = models.stock_step(scale, layers, head)
        each = by_clock(step, scale.repeats, warm=3)
        trained += each * tokens / (scale.micro_batches * scale.sequences * scale.tokens)
    return forward["lm"] + 2 * forward["value"], trained
