"""Real trainer ranks as processes, forked as `dovetail run` forks them on CPUs, and a tiny job for them."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.manifest.types import Parallelism, RLHFJob, ScratchModel, Stage
from dovetail.protocol.messages import Action, Evaluate, Export, Load, ModelRef, Save, Step
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.endings import SUPERSEDED
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.process.pulse import PULSE
from dovetail.protocol.wire import pack
from helpers.fake_coordinator import TOKEN, FakeCoordinator
from helpers.nursery import NURSERY, Adopted
from helpers.patience import PATIENCE
from helpers.whole_lines import whole_lines

VOCABULARY = 64
TINY = ScratchModel(
    architecture="llama",
    config={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
)


def job(**spec: Any) -> RLHFJob:
    """A job of a tiny Llama; `spec` (camelCase) replaces fields of the defaults below."""
    fast = {"learningRate": 3e-3, "schedule": "Constant", "warmupFraction": 0.0}
    fields: dict[str, Any] = {
        "seed": 7,
        "models": {"actor": {"source": {"scratch": TINY.model_dump(by_alias=True)}}},
        "groups": [
            {"name": "trainers", "roles": ["trainer"], "replicas": 2},
            {"name": "rollouts", "roles": ["rollout"], "replicas": 1},
        ],
        "sft": {"steps": 8, "batchSize": 8, "microBatchSize": 2, "optimizer": fast},
        "reward": {"steps": 8, "batchSize": 8, "microBatchSize": 2, "optimizer": fast},
        "dpo": {"steps": 8, "batchSize": 8, "microBatchSize": 2, "optimizer": fast},
        "ppo": {
            "iterations": 4,
            "globalBatchSize": 16,
            "miniBatchSize": 8,
            "microBatchSize": 2,
            "epochs": 2,
            "actorOptimizer": fast,
            "criticOptimizer": fast,
            "oldLogProbs": "Recompute",
        },
        "failurePolicy": {"peerTimeoutSeconds": 120},
    }
    for name, value in spec.items():
        fields[name] = {**fields[name], **value} if isinstance(fields.get(name), dict) else value
    return RLHFJob.model_validate(
        {
            "apiVersion": "dovetail.dev/v1beta1",
            "kind": "RLHFJob",
            "metadata": {"name": "tiny"},
            "spec": fields,
        }
    )


class TrainerRanks:
    """The ranks of one job, as `python -m dovetail.trainer.main`, against a FakeCoordinator."""

    def __init__(
        self,
        folder: Path,
        job: RLHFJob,
        layouts: dict[str, Parallelism],
        patience: float = PATIENCE,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._environment = environment or {}
        first = next(iter(layouts.values()))
        self.job, self.layouts, self.world_size = job, layouts, first.pp * first.dp * first.tp
        self.folder, self._patience = folder, patience
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(job.model_dump_json(by_alias=True))
        plan = Plan(world_size=self.world_size, parallelism=layouts, batching=[], tasks=[], trainers=[], rollouts=[])
        (folder / "plan.json").write_text(plan.model_dump_json(by_alias=True))
        self.coordinator = FakeCoordinator(self.world_size)
        self.processes: dict[int, Adopted] = {}
        self._starting, self._over = threading.Lock(), threading.Event()
        self._launcher = threading.Thread(target=self._start_again, daemon=True)
        self._launcher.start()

    def __enter__(self) -> TrainerRanks:
        for rank in range(self.world_size):
            self.start(rank)
        return self

    def _start_again(self) -> None:
        """As the launcher does with a rank that ended to begin anew: on a machine that stands still for seconds any
        rank may be late to leave a generation."""
        while not self._over.wait(0.2):
            self.restart_exited(SUPERSEDED)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._launcher.join(PATIENCE)
        for process in self.processes.values():
            process.kill()
            process.wait(PATIENCE)
        self.coordinator.close()

    def process_env(self, name: str, rank: int) -> ProcessEnv:
        """What a process of the job reads of its environment."""
        return ProcessEnv(
            job="tiny",
            name=name,
            run_dir=self.folder,
            coordinator=self.coordinator.address,
            token=TOKEN,
            host="127.0.0.1",
            port=0,
            metrics_port=0,
            group="trainers",
            rank=rank,
            world_size=self.world_size,
        )

    def start(self, rank: int) -> None:
        """Start a rank, also in place of one that died."""
        env = self.process_env(f"trainer-{rank}", rank)
        # A rank that is killed leaves what it put beside its pulse to its starter.
        beside = {PULSE: str(self.folder / f"rank-{rank}.pulse"), "OMP_NUM_THREADS": "1"}
        variables = {**os.environ, **env.write(), **beside, **self._environment}
        patience = ("--patience", str(self._patience))
        self.processes[rank] = NURSERY.fork(
            self.folder / f"rank-{rank}.log", variables, "dovetail.trainer.main", *patience
        )

    def kill(self, rank: int) -> None:
        """SIGKILL."""
        self.processes[rank].kill()
        self.processes[rank].wait(PATIENCE)

    def replace(self, rank: int) -> None:
        """SIGKILL, and start it anew."""
        with self._starting:
            self.kill(rank)
            self.start(rank)

    def restart_exited(self, code: int | None = None) -> None:
        """What a launcher does: start every rank anew whose process has ended, with this exit code if one is given."""
        with self._starting:
            for rank, process in list(self.processes.items()):
                ended = process.poll()
                if ended is not None and code in (None, ended):
                    self.start(rank)

    def log(self, rank: int) -> list[dict[str, Any]]:
        """The rank's events."""
        lines = whole_lines(self.folder / f"rank-{rank}.log")
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_for_event(self, rank: int, event: str, timeout: float = PATIENCE, **fields: Any) -> None:
        """Until the rank has logged such an event; raises TimeoutError with the log's end."""
        deadline = time.monotonic() + timeout
        while True:
            for record in self.log(rank):
                if record["event"] == event and all(record.get(k) == v for k, v in fields.items()):
                    return
            if time.monotonic() > deadline:
                tail = (self.folder / f"rank-{rank}.log").read_text(errors="replace")[-3000:]
                raise TimeoutError(f"rank {rank} did not log {event} {fields}; its log ends:\n{tail}")
            time.sleep(0.02)

    # ------------------------------------------------------------ commands

    def load(self, stage: Stage, total_steps: int = 8, checkpoint: Path | None = None, id: str = "load") -> Load:
        return load_command(stage, total_steps, checkpoint, id)

    def step(self, stage: Stage, step: int, batch: str, **fields: Any) -> Step:
        spec = self.job.spec
        if stage is Stage.PPO:
            size, micro = spec.ppo.mini_batch_size, spec.ppo.micro_batch_size
            names = [name for name in ("actor", "critic") if name in self.layouts]
        else:
            part = spec.supervised(stage)
            size, micro = part.batch_size, part.micro_batch_size
            names = [stage.model]
        micro = micro if fields.get("micro_batch_tokens") is None else 1
        actions: list[list[Action]] = [[] for _ in range(self.world_size)]
        for name in names:
            layout = self.layouts[name]
            for rank in range(self.world_size):
                pp_rank = rank // (layout.dp * layout.tp)
                actions[rank] += one_forward_one_backward(name, pp_rank, layout.pp, size // (layout.dp * micro))
        return Step(id=f"{stage.value}/{step}/step", stage=stage, step=step, batch=batch, actions=actions, **fields)

    def evaluate(self, stage: Stage, batches: list[str], id: str = "evaluate") -> Evaluate:
        return Evaluate(id=id, stage=stage, batches=batches)

    def save(self, path: Path, id: str = "save") -> Save:
        return Save(id=id, path=str(path))

    def export(self, model: str, path: Path, id: str = "export") -> Export:
        return Export(id=id, model=model, path=str(path))  # type: ignore[arg-type]


def load_command(stage: Stage, total_steps: int = 8, checkpoint: Path | None = None, id: str = "load") -> Load:
    """The stage's tiny models from scratch, or from a checkpoint."""
    head = {"actor": "lm", "critic": "value", "reward": "value"}
    names = ["actor", "critic"] if stage is Stage.PPO else [stage.model]
    models = {
        name: ModelRef(head=head[name], scratch=TINY, seed=i, path=None, tokenizer=None)  # type: ignore[arg-type]
        for i, name in enumerate(names)
    }
    path = None if checkpoint is None else str(checkpoint)
    return Load(id=id, stage=stage, models=models, total_steps=total_steps, checkpoint=path)


def layouts(pp: int = 1, dp: int = 1) -> dict[str, Parallelism]:
    """The same layout for every model."""
    return {name: Parallelism(pp=pp, dp=dp) for name in ("actor", "critic", "reward")}


def one_forward_one_backward(model: str, pp_rank: int, pp: int, micro_batches: int) -> list[Action]:
    """The 1F1B order of one pipeline stage."""
    warmup = min(pp - pp_rank - 1, micro_batches)
    order = [("F", i) for i in range(warmup)]
    for i in range(micro_batches - warmup):
        order += [("F", warmup + i), ("B", i)]
    order += [("B", i) for i in range(micro_batches - warmup, micro_batches)]
    return [Action(model=model, micro_batch=i, kind=kind) for kind, i in order]  # type: ignore[arg-type]


# ---------------------------------------------------------------- batches


def _sequences(random: np.random.Generator, count: int, longest: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Counting sequences: each token is the one before plus `step`, so that there is something to learn."""
    lengths = random.integers(6, longest + 1, count).astype(np.int32)
    starts = random.integers(0, VOCABULARY, count)
    tokens = (starts[:, None] + step * np.arange(longest)[None, :]) % VOCABULARY
    tokens[np.arange(longest)[None, :] >= lengths[:, None]] = 0
    return tokens.astype(np.int32), lengths


def sft_batch(seed: int, count: int = 8, longest: int = 20) -> bytes:
    random = np.random.default_rng(seed)
    tokens, lengths = _sequences(random, count, longest, 1)
    places = np.arange(longest)[None, :]
    mask = ((places >= 2) & (places < lengths[:, None])).astype(np.uint8)
    return pack({"tokens": tokens, "lengths": lengths, "loss_mask": mask})


def reward_batch(seed: int, count: int = 8, longest: int = 16) -> bytes:
    """Preferred: counting up by one; rejected: by three."""
    random = np.random.default_rng(seed)
    chosen, chosen_lengths = _sequences(random, count, longest, 1)
    rejected, rejected_lengths = _sequences(random, count, longest, 3)
    return pack(
        {
            "chosen_tokens": chosen,
            "chosen_lengths": chosen_lengths,
            "rejected_tokens": rejected,
            "rejected_lengths": rejected_lengths,
        }
    )


def dpo_batch(seed: int, count: int = 8, longest: int = 16, reference: bool = True) -> bytes:
    """The same preferences, and each response in the place of the one before for KTO. `reference`: with
    log-probabilities near those of an untrained model."""
    random = np.random.default_rng(seed)
    parts = [_sequences(random, count, longest, step) for step in (1, 3)]
    tokens, lengths = (np.concatenate(each) for each in zip(*parts, strict=True))
    arrays = {}
    for prefix, shift in (("", 0), ("kl_", 1)):
        moved, ends = np.roll(tokens, -shift, axis=0), np.roll(lengths, -shift)
        moved[:, :2] = tokens[:, :2]  # the prompt
        places = np.arange(longest)[None, :]
        mask = ((places >= 2) & (places < ends[:, None])).astype(np.uint8)
        arrays |= {f"{prefix}tokens": moved, f"{prefix}lengths": ends, f"{prefix}loss_mask": mask}
        if reference:
            noise = 0.1 * random.standard_normal(2 * count)
            arrays[f"{prefix}reference"] = (noise - np.log(VOCABULARY) * (ends - 2)).astype(np.float32)
    return pack(arrays)


def ppo_batch(seed: int, count: int = 16, prompt: int = 6, response: int = 10, ptx: int = 0) -> bytes:
    """Random samples; log-probabilities near those of an untrained model, log(1/VOCABULARY)."""
    random = np.random.default_rng(seed)
    prompts = random.integers(2, prompt + 1, count).astype(np.int32)
    responses = random.integers(1, response + 1, count).astype(np.int32)
    width = prompt + response
    tokens = random.integers(0, VOCABULARY, (count, width)).astype(np.int32)
    tokens[np.arange(width)[None, :] >= (prompts + responses)[:, None]] = 0
    level = -np.log(VOCABULARY)
    arrays = {
        "tokens": tokens,
        "prompt_lengths": prompts,
        "response_lengths": responses,
        "rollout_logprobs": (level + 0.05 * random.standard_normal((count, response))).astype(np.float32),
        "ref_logprobs": (level + 0.05 * random.standard_normal((count, response))).astype(np.float32),
        "values": (0.1 * random.standard_normal((count, response))).astype(np.float32),
        "scores": random.standard_normal(count).astype(np.float32),
        "groups": (np.arange(count) // 2).astype(np.int32),
        "finished": (random.random(count) < 0.7).astype(np.uint8),
    }
    if ptx:
        more, lengths = _sequences(random, ptx, 12, 1)
        arrays |= {
            "ptx_tokens": more,
            "ptx_lengths": lengths,
            "ptx_loss_mask": (np.arange(12)[None, :] < lengths[:, None]).astype(np.uint8),
        }
    return pack(arrays)
