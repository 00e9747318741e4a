"""One trainer rank of the engine's tests: `python engine_worker.py <scenario> <rank> <world> <port> <folder>`.

A scenario is a function below; what it returns goes to <folder>/<scenario>-<world>-<rank>.pt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from dovetail.api.messages import Action, Load, ModelRef
from dovetail.api.types import Parallelism, RLHFJobSpec, ScratchModel
from dovetail.trainer.engine import Engine, MicroBatch
from dovetail.trainer.groups import Groups, PeerLost

VOCAB = 64
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def spec(**changes: Any) -> RLHFJobSpec:
    optimizer = {"learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1}
    ppo = {"actor_optimizer": optimizer, "critic_optimizer": optimizer, "ema": 0.9}
    fields: dict[str, Any] = {"groups": [{"name": "t", "roles": ["trainer", "rollout"]}], "ppo": ppo}
    return RLHFJobSpec.model_validate(fields | changes)


def load_command(checkpoint: str | None = None, actor: ModelRef | None = None) -> Load:
    scratch = ScratchModel(architecture="llama", config=LLAMA)
    models = {
        "actor": actor or ModelRef(head="lm", scratch=scratch, seed=1),
        "critic": ModelRef(head="value", scratch=scratch, seed=2),
    }
    return Load(id="load", stage="ppo", models=models, total_steps=10, checkpoint=checkpoint)


def form(rank: int, world: int, port: int, pp: int, dp: int, timeout: float = 60.0) -> Groups:
    layout = Parallelism(pp=pp, dp=dp)
    return Groups.form("127.0.0.1", port, rank, world, {"actor": layout, "critic": layout}, timeout)


def global_batch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four micro-batches of unlike shapes, the same on all ranks."""
    gen = torch.Generator().manual_seed(step)
    shapes = [(2, 9), (3, 5), (1, 12), (2, 7)]
    return [
        (torch.randint(0, VOCAB, (b, t), generator=gen), torch.randint(2, t + 1, (b,), generator=gen))
        for b, t in shapes
    ]


def micro_batches(head: str, step: int, dp_rank: int, dp_size: int) -> list[MicroBatch]:
    """This dp rank's share, each loss divided by the sequences of the whole mini-batch."""
    batch = global_batch(step)
    total = sum(tokens.shape[0] for tokens, _ in batch)

    def make(tokens: torch.Tensor, lengths: torch.Tensor) -> MicroBatch:
        mask = torch.arange(tokens.shape[1])[None] < lengths[:, None]

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if head == "lm":
                each = F.cross_entropy(output[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none") * mask[:, 1:]
            else:
                each = (output - tokens / VOCAB).square() * mask
            value = each.sum() / total
            return value, {"loss": value.detach(), "count": torch.tensor(float(tokens.shape[0]))}

        return MicroBatch(tokens, lengths, loss)

    return [make(*item) for item in batch[dp_rank::dp_size]]


def serial_actions(engine: Engine, count: int, order: tuple[str, ...] = ("actor", "critic")) -> list[Action]:
    """1F1B of each model in turn."""
    actions = []
    for name in order:
        groups = engine.models[name].groups
        ahead = min(count, groups.pp_size - groups.pp_rank)
        kinds = ["F"] * ahead
        for done in range(count):
            kinds += ["B"] + ["F"] * (ahead + done < count)
        index = {"F": 0, "B": 0}
        for kind in kinds:
            actions.append(Action(model=name, micro_batch=index[kind], kind=kind))
            index[kind] += 1
    return actions


def interleaved_actions(engine: Engine, count: int) -> list[Action]:
    """All forwards of both models, then all backwards, models alternating: the same on all ranks."""
    return [Action(model=m, micro_batch=i, kind=k) for k in "FB" for i in range(count) for m in ("critic", "actor")]


def train(engine: Engine, steps: range, interleaved: bool = False) -> list[dict[str, Any]]:
    log = []
    for step in steps:
        work = {
            name: micro_batches(model.head, step, model.dp_rank, model.dp_size)
            for name, model in engine.models.items()
        }
        count = len(work["actor"])
        actions = interleaved_actions(engine, count) if interleaved else serial_actions(engine, count)
        stats = engine.run(actions, work)
        norms = {name: engine.optimizer_step(name) for name in engine.models}
        engine.after_actor_step()
        engine.step = step
        log.append({"stats": stats, "norms": norms})
    return log


def weights(engine: Engine) -> dict[str, dict[str, torch.Tensor]]:
    """Every model's tensors of this stage, whole."""
    return {
        name: {key: value.clone() for key, value in engine.weights(name)}
        for name in [*engine.models, *(["ema"] if engine.ema else [])]
    }


def shards(engine: Engine) -> dict[str, torch.Tensor]:
    from dovetail.trainer.optim import local

    return {f"{m}.{n}": local(p).clone() for m, e in engine.models.items() for n, p in e.trainable().items()}


# ------------------------------------------------------------ scenarios


def training(rank: int, world: int, port: int, folder: Path) -> dict[str, Any]:
    """Train two steps under every layout, continue from the checkpoint, load it into another layout, export."""
    layouts = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(2, 2)]}[world]
    out: dict[str, Any] = {}
    for number, (pp, dp) in enumerate(layouts):
        key = f"{pp}x{dp}"
        groups = form(rank, world, port + number, pp, dp)
        engine = Engine(spec(), groups)
        engine.load(load_command())
        log = train(engine, range(1, 3))
        path = folder / f"checkpoint-{key}"
        engine.save(path)
        engine.export("actor", folder / f"actor-{key}")
        engine.export("critic", folder / f"critic-{key}")
        engine.export("ema", folder / f"ema-{key}")
        read = engine.forward("actor", micro_batches("lm", 9, 0, 2), lambda logits, mb: logits.logsumexp(-1).float())
        at_two = weights(engine)
        log += train(engine, range(3, 5))
        end, end_shards = weights(engine), shards(engine)

        engine.load(load_command(str(path)))
        assert engine.step == 2
        train(engine, range(3, 5))
        replay = shards(engine)
        exact = all(torch.equal(end_shards[name], replay[name]) for name in end_shards)

        engine.load(load_command())
        log2 = train(engine, range(1, 5), interleaved=True)
        fused = shards(engine)
        schedule_free = all(torch.equal(end_shards[name], fused[name]) for name in end_shards) and log2 == log
        groups.close()
        out[key] = {
            "log": log,
            "at_two": at_two,
            "end": end,
            "replay_exact": exact,
            "schedule_free": schedule_free,
            "read": [r.clone() for r in read],
        }
    return out


def reshard(rank: int, world: int, port: int, folder: Path) -> dict[str, Any]:
    """Load a checkpoint of pp 2 x dp 1 as pp 1 x dp 2 and the other way round, and train on."""
    out = {}
    for number, (pp, dp, source) in enumerate([(1, 2, "2x1"), (2, 1, "1x2")]):
        groups = form(rank, world, port + number, pp, dp)
        engine = Engine(spec(), groups)
        engine.load(load_command(str(folder / f"checkpoint-{source}")))
        loaded = weights(engine)
        train(engine, range(3, 5))
        out[source] = {"step": engine.step, "loaded": loaded, "end": weights(engine)}
        groups.close()
    return out


SCENARIOS = {f.__name__: f for f in (training, reshard)}


def main() -> None:
    scenario, rank, world, port, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    result = SCENARIOS[scenario](rank, world, port, Path(folder))
    torch.save(result, Path(folder) / f"{scenario}-{world}-{rank}.pt")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
