"""TRL's first batch through our algorithms and our trainer: do the numbers agree?

Two conventions of TRL's differ from ours, and the batch is adapted to them:

- A response that ended by itself has one more step after its end token. The score is the reward of that step and not
  of the end token, and the critic learns the value there too. So GAE, returns and the value loss are computed with
  one more token for those rows; advantages are whitened, and the policy loss taken, over the response alone.
- Log-probabilities outside the mask are 1 in both policies, which makes the KL there 0.

Then TRL's optimizer steps are repeated by our trainer's own step command (model, backward pass and AdamW included):
the loss of each step depends on all updates before it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.manifest.types import Parallelism, RLHFJob, Stage
from dovetail.protocol.messages import Action, Load, ModelRef, Step
from dovetail.protocol.wire import pack
from dovetail.trainer.algorithms.advantages import compute_advantages, whiten
from dovetail.trainer.command_runner import CommandRunner
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.rank.coordinator_client import RankProcess
from e2e.ours import manifest
from e2e.settings import Folder, Settings

TOLERANCE = 1e-4
TENSORS = dict[str, Tensor]


@dataclass(frozen=True)
class Agreement:
    """A quantity by both: `trl` and `ours` its values (of tensors, the mean), `difference` the largest absolute one."""

    name: str
    trl: list[float]
    ours: list[float]
    difference: float

    @property
    def ok(self) -> bool:
        return self.difference <= TOLERANCE


def compare(name: str, trl: Tensor, ours: Tensor) -> Agreement:
    scalar = trl.dim() == 1 and len(trl) < 16
    means = [x.tolist() if scalar else [float(x.double().mean())] for x in (trl, ours)]
    return Agreement(name, means[0], means[1], float((trl.double() - ours.double()).abs().max()))


def agree(folder: Folder, settings: Settings, dump: Path) -> list[Agreement]:
    """`settings`: those of the dumped run, whose mini-batch was the whole batch and which made `epochs` steps."""
    from safetensors.torch import load_file

    batch = load_file(str(dump))
    job = manifest(folder, settings, trainers=1, rollouts=1)
    mask, longer = ~batch["padding_mask"], ~batch["padding_mask_p1"]
    made = compute_advantages(
        job.spec.ppo.model_copy(update={"whiten_advantages": False}),
        scores=batch["scores"],
        logprobs=batch["logprobs"],
        ref_logprobs=batch["ref_logprobs"],
        mask=longer,
        groups=torch.arange(len(mask)),
        finished=torch.ones(len(mask), dtype=torch.bool),
        kl_coef=settings.kl_coef,
        values=batch["values"],
    )
    assert made.returns is not None
    advantages = whiten(made.advantages, mask)
    results = [
        compare("token rewards", torch.where(longer, batch["rewards"], 0.0), made.rewards),
        compare("returns", torch.where(longer, batch["returns"], 0.0), made.returns),
        compare("advantages", batch["advantages"], advantages),
    ]
    policy = train(job, folder, batch, mask, advantages, made.returns, "actor", settings.epochs)
    value = train(job, folder, batch, longer, advantages, made.returns, "critic", settings.epochs)
    return [
        *results,
        compare("policy loss, each step", batch["policy_losses"], policy),
        compare("value loss, each step", batch["value_losses"], value),
    ]


def train(
    job: RLHFJob,
    folder: Folder,
    batch: TENSORS,
    mask: Tensor,
    advantages: Tensor,
    returns: Tensor,
    model: str,
    steps: int,
) -> Tensor:
    """The loss of `model` at each of our trainer's optimizer steps on the whole batch, (steps,)."""
    models = {
        "actor": ModelRef(head="lm", path=str(folder.actor), tokenizer=str(folder.actor), seed=0),
        "critic": ModelRef(head="value", path=str(folder.critic), tokenizer=str(folder.critic), seed=0),
    }
    if model == "actor":
        del models["critic"]
    loss = "policy_loss" if model == "actor" else "value_loss"
    rows = len(mask)
    sizes = dict.fromkeys(("global_batch_size", "mini_batch_size", "micro_batch_size"), rows)
    spec = job.spec.model_copy(update={"ppo": job.spec.ppo.model_copy(update={"epochs": 1, **sizes})})
    source = _Batches(pack(arrays(batch, mask, advantages, returns)))
    actions = [Action(model=model, micro_batch=0, kind="F"), Action(model=model, micro_batch=0, kind="B")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    layout = dict.fromkeys(("actor", "critic", "reward"), Parallelism())
    groups = Groups.form("127.0.0.1", port, 0, 1, layout, 60.0)
    runner = CommandRunner(RankProcess("trainer-0", source, lambda *_, **__: None), spec, groups, {})  # type: ignore[arg-type]
    try:
        _metrics(runner, Load(id="load", stage=Stage.PPO, models=models, total_steps=steps))
        found = []
        for k in range(1, steps + 1):
            step = Step(
                id=f"ppo/{k}/step",
                stage=Stage.PPO,
                step=k,
                batch="ppo",
                actions=[actions],
                train_actor=model == "actor",
            )
            found.append(_metrics(runner, step)[loss])
    finally:
        groups.close()
        runner.close()
    return torch.tensor(found)


def arrays(batch: TENSORS, mask: Tensor, advantages: Tensor, returns: Tensor) -> dict[str, Any]:
    """The batch as the coordinator would send it (docs/architecture.md, "Batches"); `mask` gives the lengths."""
    lengths = mask.sum(dim=1)
    prompt = batch["query_responses"].shape[1] - mask.shape[1]

    def per_token(x: Tensor) -> np.ndarray[Any, Any]:
        return torch.where(mask, x, 0.0).numpy()

    return {
        "tokens": batch["query_responses"].int().numpy(),
        "prompt_lengths": np.full(len(mask), prompt, np.int32),
        "response_lengths": lengths.int().numpy(),
        "rollout_logprobs": per_token(batch["logprobs"]),
        "ref_logprobs": per_token(batch["ref_logprobs"]),
        "values": per_token(batch["values"]),
        "advantages": per_token(advantages),
        "returns": per_token(returns),
        "scores": batch["scores"].numpy(),
        "groups": np.arange(len(mask), dtype=np.int32),
        "finished": np.ones(len(mask), np.uint8),
    }


class _Batches:
    """The part of the coordinator's client that a step needs."""

    def __init__(self, batch: bytes) -> None:
        self._batch = batch

    def batch(self, key: str, part: Any = None) -> bytes:
        return self._batch


def _metrics(runner: CommandRunner, command: Load | Step) -> dict[str, float]:
    result = runner.execute(command)
    if not result.ok:
        raise RuntimeError(f"our trainer could not {command.id}: {result.error}")
    return result.metrics
