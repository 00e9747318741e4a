"""Programs of trainer ranks."""

from __future__ import annotations

import ctypes
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  once for all ranks
from worker import DEADLINE, Place

from dovetail.coordinator.loop.serial_schedule import serial_1f1b
from dovetail.coordinator.loop.stored_schedule import StoredSchedule, encode
from dovetail.manifest.types import Parallelism, RLHFJobSpec, ScratchModel
from dovetail.protocol.messages import Load, ModelRef
from dovetail.protocol.plan import Layout
from dovetail.trainer.engine import checkpoint
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.groups import Groups
from dovetail.trainer.packed_batches import Sequences

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def micro_batches(count: int) -> list[MicroBatch]:
    """Of unlike shapes, the same on all ranks; the loss computes no sense, as nothing here does."""

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.float().mean()
        return value, {"loss": value.detach()}

    made = []
    for length in itertools.islice(itertools.cycle((9, 12, 5, 7)), count):
        read = torch.ones(2, length, dtype=torch.bool)
        read[:, -1] = False
        packed = Sequences(torch.zeros(2, length, dtype=torch.int64), torch.tensor([length, length])).pack([0, 1], read)
        made.append(MicroBatch(packed, loss))
    return made


def counts() -> dict[str, int]:
    """What this process has asked of the GPU until now."""
    read = ctypes.CDLL(None).nullgpu_count
    read.restype = ctypes.c_long
    names = ("launches", "h2d", "d2h", "synchronisations", "communicators", "collectives", "sends", "receives")
    return {name: read(name.encode()) for name in names}


def train(
    place: Place,
    schedules: list[Any],
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    reverse: bool = False,
    offload: bool = False,
) -> dict[str, Any]:
    """A PPO engine runs one mini-batch by each of the schedules, one string of letters a rank; a number n: 1F1B of n
    micro-batches, actor, then critic. With `offload` it then saves and restores a checkpoint."""
    rank, sizes = place.rank, {"pp": pp, "dp": dp, "tp": tp}
    layouts = {"actor": Parallelism(**sizes), "critic": Layout(**sizes, reverse=reverse)}
    groups = Groups.form("127.0.0.1", place.port, rank, place.world, layouts, DEADLINE)
    made = counts()
    optimizer = {"offload": offload}
    spec = {
        "groups": [{"name": "t", "roles": ["trainer", "rollout"]}],
        "ppo": {"ema": 0.9, "actor_optimizer": optimizer, "critic_optimizer": optimizer},
        "plan": {"sharding": "Always"},  # small as these models are
    }
    engine = Engine(RLHFJobSpec.model_validate(spec), groups)
    scratch = ScratchModel(architecture="llama", config=LLAMA)
    models = {
        "actor": ModelRef(head="lm", scratch=scratch, seed=1),
        "critic": ModelRef(head="value", scratch=scratch, seed=2),
    }
    engine.load(Load(id="load", stage="ppo", models=models, total_steps=4, checkpoint=None))
    assert groups.device == torch.device("cuda", rank)
    runs = []
    for words in schedules:
        if isinstance(words, int):
            words = encode(serial_1f1b(layouts, dict.fromkeys(models, words), list(models)))
        actions = StoredSchedule("", 1, words).actions()[rank]
        before, steps = counts(), []
        work = {name: micro_batches(words[rank].upper().count("F") // len(models)) for name in engine.models}
        engine.run(actions, work, 1, lambda name, applied, steps=steps: steps.append(name), json.dumps(words))
        torch.cuda.synchronize()
        runs.append({"steps": steps, "used": {name: value - before[name] for name, value in counts().items()}})
    found = {"communicators": made["communicators"], "runs": runs}
    if offload:
        found |= restored(engine, place.folder / "checkpoint")
    groups.close()
    return found


def restored(engine: Engine, path: Path) -> dict[str, Any]:
    """Give the moments in host memory values, save, wipe and restore: which lost theirs."""
    moments = {
        f"{model}.{name}.{i}": moment
        for model, held in engine.models.items()
        for name, pair in held.optimizer.moments.items()
        for i, moment in enumerate(pair)
    }
    assert all(moment.is_pinned() or not moment.numel() for moment in moments.values())
    for number, moment in enumerate(moments.values(), 1):
        moment.fill_(number + engine.groups.rank / 2)
    engine.save(path)
    for moment in moments.values():
        moment.zero_()
    checkpoint.restore(engine, path)
    lost = [
        name
        for number, (name, moment) in enumerate(moments.items(), 1)
        if not torch.all(moment == number + engine.groups.rank / 2)
    ]
    return {"moments": len(moments), "lost": lost}
