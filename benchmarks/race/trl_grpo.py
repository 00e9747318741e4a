"""TRL's GRPOTrainer on a task, and what its optimizer steps were made from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from race.tasks import score

LOSSES = {"Token": "dapo", "Sequence": "grpo", "Constant": "dr_grpo"}


def config(chosen: dict[str, Any], seed: int, folder: str) -> GRPOConfig:
    batch, steps = chosen["prompts"] * chosen["samples"], chosen["mini_batches"]
    loss = "cispo" if chosen["loss"] == "cispo" else LOSSES[chosen["aggregation"]]
    return GRPOConfig(
        output_dir=folder,
        max_steps=chosen["iterations"] * steps * chosen["epochs"],
        per_device_train_batch_size=batch // steps,
        gradient_accumulation_steps=1,
        steps_per_generation=steps,
        num_iterations=chosen["epochs"],
        num_generations=chosen["samples"],
        max_completion_length=chosen["max_tokens"],
        temperature=1.0,
        learning_rate=chosen["learning_rate"],
        weight_decay=chosen["weight_decay"],
        beta=chosen["kl_coef"],
        epsilon=0.2,
        # CISPO's bound is the ratio itself.
        epsilon_high=chosen["clip_high"] + (chosen["loss"] == "cispo"),
        importance_sampling_level="sequence" if chosen["loss"] == "gspo" else "token",
        loss_type=loss,
        scale_rewards="group" if chosen["normalize_std"] else "none",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        seed=seed,
    )


class Recorder:
    """Notes the mean reward of each generation, and with `steps` what each optimizer step was made from, and the
    weights after it (`weights.NAME`)."""

    def __init__(self, trainer: Any, steps: bool) -> None:
        self.rewards: list[float] = []
        self.steps: list[dict[str, Tensor]] = []
        self._trainer = trainer
        self._inputs: dict[str, Tensor] = {}
        self._scores = torch.empty(0)
        calculate, generate, loss = (
            trainer._calculate_rewards,
            trainer._generate_and_score_completions,
            trainer._compute_loss,
        )

        def calculate_rewards(*args: Any) -> Tensor:
            rewards: Tensor = calculate(*args)
            self._scores = rewards[:, 0].clone()
            self.rewards.append(float(self._scores.mean()))
            return rewards

        def scored(inputs: Any) -> dict[str, Any]:
            batch: dict[str, Any] = generate(inputs)
            self._groups = {"group_scores": self._scores, "group_advantages": batch["advantages"].clone()}
            # TRL shuffles the rows of the batch, with all that belongs to them.
            return batch | {"before": self._logprobs(batch)}

        def compute_loss(model: Any, inputs: dict[str, Any]) -> Tensor:
            self._inputs = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
            found: Tensor = loss(model, inputs)
            return found

        trainer._calculate_rewards = calculate_rewards
        if steps:
            trainer._generate_and_score_completions, trainer._compute_loss = scored, compute_loss
            trainer.create_optimizer()
            trainer.optimizer.register_step_post_hook(self._stepped)

    @torch.no_grad()
    def _logprobs(self, batch: dict[str, Any]) -> Tensor:
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        width = batch["completion_ids"].shape[1]
        get = self._trainer._get_per_token_logps_and_entropies
        found: Tensor = get(self._trainer.model, tokens, attention, width)[0]
        return found

    def _stepped(self, *_: Any) -> None:
        weights = {f"weights.{name}": p.detach().clone() for name, p in self._trainer.model.named_parameters()}
        self.steps.append(self._inputs | self._groups | weights)


def run(base: Path, settings: dict[str, Any], seed: int, out: Path | None, callbacks: Sequence[Any] = ()) -> Recorder:
    """Train the model in `base` on its prompts.jsonl. The result goes to `out`; without it, steps are recorded."""
    records = [json.loads(line) for line in (base / "prompts.jsonl").read_text().splitlines()]

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return score(prompts, completions, answer)

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            reward_funcs=reward,
            args=config(settings, seed, folder),
            train_dataset=Dataset.from_list(records),
            processing_class=AutoTokenizer.from_pretrained(base),
            callbacks=list(callbacks),
        )
        recorder = Recorder(trainer, steps=out is None)
        trainer.train()
        if out is not None:
            trainer.save_model(str(out))
    return recorder
