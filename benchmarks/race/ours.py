"""Our trainer on the tasks, and TRL's optimizer steps repeated by our trainer."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dovetail.coordinator.data.collection import Blend
from dovetail.manifest.types import Parallelism, RLHFJob, Stage
from dovetail.protocol.messages import Action, Load, ModelRef, Step
from dovetail.protocol.wire import pack
from dovetail.trainer.algorithms.advantages import compute_advantages
from dovetail.trainer.command_runner import CommandRunner
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.rank.coordinator_client import RankProcess
from race.models import EOS, tokenizer
from race.tasks import score

# AdamW and its schedule as TRL has them by default. Everything else of the manifest below is a size or a default.
TRL_OPTIMIZER = {"beta2": 0.999, "schedule": "Linear", "warmupFraction": 0.0}


def manifest(base: Path, settings: dict[str, Any], seed: int, optimizer: dict[str, Any]) -> RLHFJob:
    batch = settings["prompts"] * settings["samples"]
    own = {"learningRate": settings["learning_rate"], "weightDecay": settings["weight_decay"]}
    spec = {
        "seed": seed,
        "stages": ["ppo"],
        "models": {
            "actor": {"source": {"path": str(base)}, "dtype": "float32"},
            "reward": {"function": "tasks:score", "importPath": str(Path(__file__).parent), "workers": 1},
        },
        "data": {"prompts": [{"path": str(base / "prompts.jsonl")}], "heldOut": 0.0},
        "ppo": {
            "iterations": settings["iterations"],
            "advantage": "grpo",
            "globalBatchSize": batch,
            "samplesPerPrompt": settings["samples"],
            "miniBatchSize": batch // settings["mini_batches"],
            "microBatchSize": batch // settings["mini_batches"],
            "epochs": settings["epochs"],
            "loss": settings["loss"],
            "clipHigh": settings["clip_high"],
            "lossAggregation": settings["aggregation"],
            "normalizeStd": settings["normalize_std"],
            "kl": {"coef": settings["kl_coef"]},
            "actorOptimizer": own | optimizer,
        },
        "generation": {"maxTokens": settings["max_tokens"]},
        "evaluation": {"heldOut": 0},
        "groups": [
            {"name": "trainers", "roles": ["trainer"]},
            {"name": "rollouts", "roles": ["rollout"], "dtype": "float32"},
        ],
        "checkpoint": {"everySteps": 1_000_000},
        "failurePolicy": {"peerTimeoutSeconds": 900},
    }
    return RLHFJob.model_validate(
        {"apiVersion": "dovetail.dev/v1beta1", "kind": "RLHFJob", "metadata": {"name": "race"}, "spec": spec}
    )


def repeat(job: RLHFJob, base: Path, steps: list[dict[str, Tensor]]) -> dict[str, float]:
    """Make TRL's steps once more with our trainer's step command, from TRL's samples, rewards and
    log-probabilities before the update.

    Returns the largest difference of an advantage, and the L2 norm of the difference between the weights after the last
    step over that of the change that TRL's steps made."""
    apart = 0.0
    for step in steps:
        scores, theirs = step["group_scores"], step["group_advantages"]
        every = torch.ones(len(scores), 1)
        groups = torch.arange(len(scores)) // job.spec.ppo.samples_per_prompt
        zero = torch.zeros_like(every)
        made = compute_advantages(
            job.spec.ppo,
            scores=scores,
            logprobs=zero,
            ref_logprobs=zero,
            mask=every,
            groups=groups,
            finished=every[:, 0].bool(),
            kl_coef=0.0,
        )
        apart = max(apart, float((made.advantages[:, 0] - theirs).abs().max()))
    rows = len(steps[0]["completion_ids"])
    sizes = {"globalBatchSize": rows, "miniBatchSize": rows, "microBatchSize": rows, "epochs": 1}
    document = job.model_dump(by_alias=True, mode="json")
    document["spec"]["ppo"] |= sizes | {"iterations": len(steps), "oldLogProbs": "Rollout"}
    trainer = Trainer(RLHFJob.model_validate(document), base)
    try:
        for step in steps:
            trainer.step(_arrays(step))
        weights = trainer.weights()
    finally:
        trainer.close()
    before = load_file(str(base / "model.safetensors"))
    theirs = {name.removeprefix("weights."): t for name, t in steps[-1].items() if name.startswith("weights.")}
    assert weights.keys() == theirs.keys() == before.keys()

    def norm(one: dict[str, Tensor]) -> float:
        return float(sum((one[name] - theirs[name]).double().square().sum() for name in theirs)) ** 0.5

    return {"advantages": apart, "difference": norm(weights) / norm(before)}


class Trainer:
    """One rank of our trainer in this process, which executes the coordinator's commands."""

    def __init__(self, job: RLHFJob, base: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        layout = dict.fromkeys(("actor", "critic", "reward"), Parallelism())
        self._groups = Groups.form("127.0.0.1", port, 0, 1, layout, 600.0)
        self._steps, self._batch = 0, b""
        client: Any = self
        self._runner = CommandRunner(
            RankProcess("trainer-0", client, lambda *_, **__: None), job.spec, self._groups, {}
        )
        actor = ModelRef(head="lm", path=str(base), tokenizer=str(base), seed=0)
        self._execute(Load(id="load", stage=Stage.PPO, models={"actor": actor}, total_steps=job.spec.ppo.iterations))

    def batch(self, key: str, part: Any = None) -> bytes:
        """The part of the coordinator's client that a step needs."""
        return self._batch

    def _execute(self, command: Load | Step) -> None:
        result = self._runner.execute(command)
        if not result.ok:
            raise RuntimeError(f"our trainer could not {command.id}: {result.error}")

    def step(self, arrays: dict[str, Any]) -> None:
        self._steps += 1
        self._batch = pack(arrays)
        key = f"ppo/{self._steps}"
        actions = [Action(model="actor", micro_batch=0, kind=kind) for kind in ("F", "B")]
        self._execute(
            Step(id=f"{key}/step", stage=Stage.PPO, step=self._steps, batch=key, actions=[actions], train_actor=True)
        )

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self._runner.engine.weights("actor")}

    def close(self) -> None:
        self._groups.close()
        self._runner.close()


def run(job: RLHFJob, base: Path, folder: Path) -> list[float]:
    """Train with our trainer and our order of the prompts, on samples that are drawn here. The result goes to `folder`.

    Returns the mean reward of each iteration."""
    from transformers import AutoModelForCausalLM

    ppo, longest = job.spec.ppo, job.spec.generation.max_tokens
    records = [json.loads(line) for line in (base / "prompts.jsonl").read_text().splitlines()]
    blend = Blend([len(records)], [1.0], job.spec.seed, "prompts")
    tokens = tokenizer()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    torch.manual_seed(job.spec.seed)
    trainer = Trainer(job, base)
    rewards = []
    try:
        for iteration in range(1, ppo.iterations + 1):
            picks = blend.batch(iteration, ppo.global_batch_size // ppo.samples_per_prompt)
            chosen = [records[place] for _, place in picks for _ in range(ppo.samples_per_prompt)]
            ids = torch.tensor([tokens(record["prompt"])["input_ids"] for record in chosen])
            said, logprobs = draw(model, ids, longest)
            lengths = ((said == EOS).cumsum(dim=1) - (said == EOS).int() == 0).sum(dim=1)
            texts = [
                tokens.decode(row[:n], skip_special_tokens=True) for row, n in zip(said.tolist(), lengths, strict=True)
            ]
            scores = score([], texts, [record["answer"] for record in chosen])
            rewards.append(sum(scores) / len(scores))
            mask = torch.arange(longest) < lengths.unsqueeze(1)
            trainer.step(
                {
                    "tokens": torch.cat([ids, said], dim=1).int().numpy(),
                    "prompt_lengths": np.full(len(ids), ids.shape[1], np.int32),
                    "response_lengths": lengths.int().numpy(),
                    "rollout_logprobs": torch.where(mask, logprobs, 0.0).numpy(),
                    "scores": np.array(scores, np.float32),
                    "groups": (np.arange(len(ids)) // ppo.samples_per_prompt).astype(np.int32),
                    "finished": (said == EOS).any(dim=1).to(torch.uint8).numpy(),
                }
            )
            model.load_state_dict(trainer.weights())
        model.save_pretrained(folder)
        tokens.save_pretrained(folder)
    finally:
        trainer.close()
    return rewards


@torch.no_grad()
def draw(model: Any, ids: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Sampled tokens and their log-probabilities, (batch, longest), also after an end token. The cache is not worth
    its overhead here."""
    width, found = ids.shape[1], []
    for _ in range(longest):
        spread = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(spread.exp(), 1)
        found.append(spread.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    return ids[:, width:], torch.cat(found, dim=1)


def _arrays(step: dict[str, Tensor]) -> dict[str, Any]:
    """The batch as the coordinator would send it (docs/architecture.md, "Batches"). TRL's prompts are of one length."""
    mask = step["completion_mask"].bool()
    everything = torch.ones(len(mask), dtype=torch.bool)
    prompt = step["prompt_ids"].shape[1]

    def per_token(x: Tensor) -> np.ndarray[Any, Any]:
        return torch.where(mask, x, 0.0).numpy()

    arrays = {
        "tokens": torch.cat([step["prompt_ids"], step["completion_ids"]], dim=1).int().numpy(),
        "prompt_lengths": np.full(len(mask), prompt, np.int32),
        "response_lengths": mask.sum(dim=1).int().numpy(),
        "rollout_logprobs": per_token(step["before"]),
        "advantages": per_token(step["advantages"].unsqueeze(1).expand(mask.shape)),
        "scores": everything.float().numpy(),
        "groups": np.arange(len(mask), dtype=np.int32),
        "finished": everything.to(torch.uint8).numpy(),
    }
    if "ref_per_token_logps" in step:
        arrays["ref_logprobs"] = per_token(step["ref_per_token_logps"])
    return arrays
