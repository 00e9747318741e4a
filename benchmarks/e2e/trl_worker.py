"""PPO iterations of TRL, timed by phase; runs in TRL's virtual environment, alone or as ranks of torchrun.

    python trl_worker.py MODELS SETTINGS.json OUT.json [--dump DUMP.safetensors]

OUT.json (written by rank 0): one object an iteration, seconds of each phase. Phases are cut at TRL's own calls:
`generation` is batch_generation; `training` runs from the first forward pass with gradients to the last optimizer
step; `inference` is the reference, value and reward forward passes in between; `other` is the rest (advantages,
metrics, garbage collection). With --dump, what the losses of the first iteration were made from, and the losses."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.experimental.ppo import ppo_trainer as trl_ppo

sys.path.insert(0, str(Path(__file__).parents[1]))
from e2e.settings import Folder, Settings

DUMPED = (
    "query_responses",
    "logprobs",
    "ref_logprobs",
    "values",
    "scores",
    "padding_mask",
    "padding_mask_p1",
    "rewards",
    "advantages",
    "returns",
)


class Recorder:
    """Patches TRL's functions to note when they run. `rows` has one entry an iteration."""

    def __init__(self, dump: Path | None) -> None:
        self.rows: list[dict[str, float]] = []
        self.losses: list[tuple[float, float]] = []
        self._dump = dump
        self._tensors: dict[str, torch.Tensor] = {}
        self._train_start: float | None = None
        self._train_end = 0.0
        self._inference = 0.0
        self._cpu = 0.0

    def install(self, trainer: Any) -> None:
        generation, forward, reward = trl_ppo.batch_generation, trl_ppo.forward, trl_ppo.get_reward
        truncate, step = trl_ppo.truncate_response, trainer.optimizer.step

        def batch_generation(*args: Any, **kwargs: Any) -> Any:
            self.close()
            start = time.perf_counter()
            result = generation(*args, **kwargs)
            self.rows.append({"start": start, "generation": time.perf_counter() - start, "lengths": 0.0, "samples": 0})
            return result

        def inference(function: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                if torch.is_grad_enabled():
                    if self._train_start is None:
                        self._train_start = time.perf_counter()
                        self._note(sys._getframe(1).f_locals)
                    return function(*args, **kwargs)
                start = time.perf_counter()
                result = function(*args, **kwargs)
                self._inference += time.perf_counter() - start
                return result

            return timed

        def truncate_response(stop: int, pad: int, responses: torch.Tensor) -> torch.Tensor:
            result = truncate(stop, pad, responses)
            self.rows[-1]["lengths"] += float((result != pad).sum())
            self.rows[-1]["samples"] += len(result)
            return result

        def optimizer_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._train_end = time.perf_counter()
            if self._dump is not None and len(self.rows) == 1:
                caller = sys._getframe(1).f_locals
                self.losses.append((float(caller["pg_loss"]), float(caller["vf_loss"])))
            return result

        trl_ppo.batch_generation = batch_generation
        trl_ppo.forward, trl_ppo.get_reward = inference(forward), inference(reward)
        trl_ppo.truncate_response = truncate_response
        trainer.optimizer.step = optimizer_step

    def close(self) -> None:
        """The iteration that ran until now is over."""
        now, cpu = time.perf_counter(), time.process_time()
        if self.rows:
            row = self.rows[-1]
            assert self._train_start is not None, "TRL trained nothing"
            row["seconds"] = now - row.pop("start")
            row["training"] = self._train_end - self._train_start
            row["inference"] = self._inference
            row["other"] = row["seconds"] - row["generation"] - row["training"] - row["inference"]
            row["cpu_seconds"] = cpu - self._cpu
            row["response_length"] = row.pop("lengths") / max(1, row["samples"])
        self._train_start, self._inference, self._cpu = None, 0.0, cpu

    def _note(self, local: dict[str, Any]) -> None:
        if self._dump is not None and len(self.rows) == 1:
            self._tensors = {name: local[name].detach().clone().contiguous() for name in DUMPED}

    def write(self) -> None:
        if self._dump is not None:
            from safetensors.torch import save_file

            policy, value = zip(*self.losses, strict=True)
            tensors = self._tensors | {"policy_losses": torch.tensor(policy), "value_losses": torch.tensor(value)}
            save_file(tensors, str(self._dump))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("settings", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dump", type=Path)
    options = parser.parse_args()
    folder, settings = Folder(options.models), Settings.load(options.settings)
    world = int(os.environ.get("WORLD_SIZE", "1"))

    tokenizer = AutoTokenizer.from_pretrained(folder.actor)
    load = {"dtype": torch.float32}
    actor = AutoModelForCausalLM.from_pretrained(folder.actor, **load)
    reference = AutoModelForCausalLM.from_pretrained(folder.actor, **load)
    reward = AutoModelForSequenceClassification.from_pretrained(folder.reward, num_labels=1, **load)
    critic = AutoModelForSequenceClassification.from_pretrained(folder.critic, num_labels=1, **load)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in folder.texts()]
    prompts = Dataset.from_dict({"input_ids": ids})
    config = PPOConfig(
        output_dir=str(options.out.parent / "trl"),
        # One optimizer step for each mini-batch: TRL counts gradient accumulation over mini-batches, so that
        # with more than one accumulation step it would update less often than num_mini_batches says.
        per_device_train_batch_size=settings.batch // world,
        gradient_accumulation_steps=1,
        num_mini_batches=settings.mini_batches,
        num_ppo_epochs=settings.epochs,
        local_rollout_forward_batch_size=settings.batch // world,
        total_episodes=settings.batch * settings.iterations,
        response_length=settings.max_new_tokens,
        stop_token="eos",
        temperature=1.0,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        kl_coef=settings.kl_coef,
        cliprange=settings.clip,
        cliprange_value=settings.value_clip,
        vf_coef=settings.value_coef,
        gamma=settings.gamma,
        lam=settings.lam,
        missing_eos_penalty=None,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
        seed=settings.seed,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=actor,
        ref_model=reference,
        reward_model=reward,
        value_model=critic,
        train_dataset=prompts,
        eval_dataset=prompts,
    )
    recorder = Recorder(options.dump)
    recorder.install(trainer)
    trainer.train()
    recorder.close()
    if int(os.environ.get("RANK", "0")) == 0:
        recorder.write()
        options.out.write_text(json.dumps(recorder.rows))


if __name__ == "__main__":
    main()
