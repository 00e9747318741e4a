"""Trainer ranks that run every family's schedule: `python schedule_worker.py <folder> <cases.json>`.

A case is a pair of layouts, a kind of model and schedules by name; each rank writes what it found of each to
<folder>/case-<number>-<rank>.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_worker import SCENARIOS, VOCAB, micro_batch, run_together, spec

from dovetail.manifest.types import ScratchModel
from dovetail.protocol.messages import Action, Load, ModelRef, StageTimes
from dovetail.protocol.plan import Layout
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.engine.optim import local

MICRO_BATCHES, MINI_BATCHES = 4, 2
COMMON = {"vocab_size": VOCAB, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64}
WIDTH = {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 2, "tie_word_embeddings": True}
CONFIGS = {
    "llama": COMMON | WIDTH,
    "qwen2": COMMON | WIDTH | {"tie_word_embeddings": False},
    "opt": COMMON | {"hidden_size": 16, "ffn_dim": 24, "word_embed_proj_dim": 16},
}


def load(case: dict[str, Any], checkpoint: str | None = None) -> Load:
    """Actor and critic of the case, placed as its layouts say."""
    config = CONFIGS[case["architecture"]] | {"num_hidden_layers": case.get("layers", 4)}
    scratch = ScratchModel(architecture=case["architecture"], config=config)
    options = case.get("options", ())
    models = {
        "actor": ModelRef(head="lm+value" if "both heads" in options else "lm", scratch=scratch, seed=1),
        "critic": ModelRef(head="value", scratch=scratch, seed=2),
    }
    layouts = {name: Layout(**layout) for name, layout in case["layouts"].items()}
    models = {name: models[name] for name in layouts}
    ways = {way: list(models) for way in ("recompute", "zero3") if way in options}
    return Load(id="load", stage="ppo", models=models, total_steps=10, layouts=layouts, checkpoint=checkpoint, **ways)


def work(engine: Engine, copies: int) -> list[dict[str, list[MicroBatch]]]:
    """Each mini-batch's share of this rank; micro-batches of unlike shapes, the same in both. With tensor parallel
    ranks there are two shapes: torch takes ten times as long with each that is new."""
    shapes = 2 if any(m.groups.tp_size > 1 for m in engine.models.values()) else MICRO_BATCHES * copies
    minis = []
    for step in range(MINI_BATCHES):
        gen = torch.Generator().manual_seed(step)
        batch = []
        for index in range(MICRO_BATCHES * copies):
            like = index % shapes
            b, t = 1 + like % 3, 6 + 2 * (like % 4)
            lengths = torch.randint(2, t + 1, (b,), generator=torch.Generator().manual_seed(like))
            batch.append((torch.randint(0, VOCAB, (b, t), generator=gen), lengths))
        total = sum(tokens.shape[0] for tokens, _ in batch)
        minis.append(
            {
                name: [micro_batch(m.head, *item, total) for item in batch[m.dp_rank :: m.dp_size]]
                for name, m in engine.models.items()
            }
        )
    return minis


class Trial:
    """Runs schedules from one and the same start."""

    def __init__(self, engine: Engine, copies: int) -> None:
        self.engine, self.minis = engine, work(engine, copies)
        self.start = {n: p.detach().clone() for n, p in self.parameters()}
        # The peak of what was held, and what each micro-batch of each stage held, of the last run of one mini-batch.
        self.measured: tuple[int, list[StageTimes]] = (0, [])

    def parameters(self) -> Iterator[tuple[str, Any]]:
        for model, held in sorted(self.engine.models.items()):
            for name, parameter in held.trainable().items():
                yield f"{model}.{name}", parameter

    def reset(self) -> None:
        for name, parameter in self.parameters():
            local(parameter).copy_(local(self.start[name]))
            parameter.grad = None
        for held in self.engine.models.values():
            held.optimizer.steps = 0
            for pair in held.optimizer.moments.values():
                for moment in pair:
                    moment.zero_()

    def run(self, actions: list[Action], together: int, within: bool) -> dict[str, dict[str, Any]]:
        """Weights and moments after an optimizer step on each mini-batch, and each step's gradient norm. With lists of
        one mini-batch also the statistics, and what the first one measured. `within`: the run applies the steps;
        otherwise each mini-batch's gradients are left, and applied afterwards."""
        self.reset()
        self.engine.measured.take(0)
        steps: list[Any] = []

        def keep(name: str, applied: dict[str, float]) -> None:
            steps.append((name, applied))

        values: dict[str, dict[str, Any]] = {}
        for first in range(0, MINI_BATCHES, together):
            span = self.minis[first : first + together]
            both = {name: [b for mini in span for b in mini[name]] for name in self.engine.models}
            if within:
                stats = self.engine.run(actions, both, together, keep)
            else:
                stats = self.engine.run(actions, both)
                steps += [(name, self.engine.optimizer_step(name)) for name in self.engine.loaded]
            if together == 1:
                values.setdefault("statistics", {})[str(first)] = stats
                if not first:
                    self.measured = self.engine.measured.peak_bytes, self.engine.measured.take(self.engine.groups.rank)
        steps.sort(key=lambda step: step[0])  # within a model they come in order
        moments = {f"{m}.{n}": pair for m, held in self.engine.models.items() for n, pair in self._moments(held)}
        weights = {n: local(p).clone() for n, p in self.parameters()}
        return values | {"weights": weights, "moments": moments, "steps": {"steps": steps}}

    @staticmethod
    def _moments(held: Any) -> Iterator[tuple[str, Any]]:
        """Sums of all steps' gradients, and of their squares. What differs in a gradient differs here."""
        for name, pair in held.optimizer.moments.items():
            for index, moment in enumerate(pair):
                yield f"{name}.{index}", moment.clone()


def after_restart(trial: Trial, case: dict[str, Any], path: Path) -> list[str]:
    """Names of the parameters that a checkpoint does not bring back."""
    before = {n: local(p).clone() for n, p in trial.parameters()}
    trial.engine.save(path)
    trial.engine.load(load(case, str(path)))
    return same(before, {n: local(p) for n, p in trial.parameters()})


def by_whole_name(engine: Engine, values: dict[str, Any]) -> dict[tuple[str, str, int, int], tuple[Any, bool]]:
    """Parameters by model, name in the whole model, tensor-parallel and data-parallel rank: the same wherever the
    stages are. With whether the rank holds but a part of what the tensor-parallel rank has."""
    return {
        (model, held.module.checkpoint_name(name), held.groups.tp_rank, held.dp_rank): (mine, mine.shape != whole.shape)
        for model, held in engine.models.items()
        for name, whole in held.trainable().items()
        for mine in [values[f"{model}.{name}"]]
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what differs in a bit."""
    return [n for n in a if not (torch.equal(a[n], b[n]) if isinstance(a[n], torch.Tensor) else a[n] == b[n])]


def schedules(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """Every case of this world: what differs from the serial schedule's gradients and weights, by family."""
    port = next(ports)
    cases = json.loads((folder / "cases.json").read_text())
    first = True
    groups: Any = None
    found: dict[str, Any] = {}
    for number, case in enumerate(cases):
        if case["world"] != world:
            continue
        layouts = {name: Layout(**layout) for name, layout in case["layouts"].items()}
        if first:
            groups, first = Groups.form("127.0.0.1", port, rank, world, layouts, 60.0), False
        trained = {"lora": {"rank": 2, "dropout": 0.1}} if case["lora"] else {}
        engine = Engine(spec(models={"actor": trained, "critic": trained}, plan={"sharding": case["sharding"]}), groups)
        engine.load(load(case))
        trial = Trial(engine, case["copies"])
        result, memory = {}, {}
        expected: dict[str, Any] = {}
        for index, (name, (together, lists)) in enumerate(case["schedules"].items()):
            models = {"a": "actor", "c": "critic"}
            actions = [Action(model=models[m], kind=k, micro_batch=i, chunk=c) for m, k, i, c in lists[rank]]
            # Either way of stepping is compared with the first schedule's.
            got = trial.run(actions, together, within=together > 1 or index % 2 == 0)
            if together == 1:
                peak, times = trial.measured
                memory[name] = peak, [(t.model, t.chunk, t.activation) for t in times]
            expected = expected or got
            result[name] = {what: same(values, expected[what]) for what, values in got.items()}
        moved = [n for n in trial.start if not torch.equal(local(trial.start[n]), expected["weights"][n])]
        found[str(number)] = {"differs": result, "moved": len(moved), "parameters": len(trial.start)}
        found[str(number)]["final"] = by_whole_name(engine, expected["weights"])
        found[str(number)]["memory"] = memory
        found[str(number)]["groups"] = len(dist.distributed_c10d._world.pg_map)
        if case["restarts"]:
            found[str(number)]["lost"] = after_restart(trial, case, folder / f"checkpoint-{number}")
    groups.close()
    return found


def main() -> None:
    """Fork the ranks of every world in turn."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.opt.modeling_opt
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    SCENARIOS["schedules"] = schedules
    worlds = sorted({case["world"] for case in json.loads((folder / "cases.json").read_text())})
    statuses = [
        run_together([{"scenario": "schedules", "world": w, "rank": r} for r in range(w)], folder) for w in worlds
    ]
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main()
