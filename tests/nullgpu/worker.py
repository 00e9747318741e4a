"""Trainer ranks on the null GPU: `python worker.py <folder> <scenarios as JSON>`.

A scenario is {"name", "do", "world", ...}: `do` names a function below. One import of torch serves all ranks, which are
forked. The end of each goes to <folder>/<name>.json: "statuses" of the ranks, "waits" (what each rank that was stuck
waited for) and "results". A scenario ends early when its ranks are stuck."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from engine_worker import free_ports

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

DEADLINE = 240.0
# How long what ranks wait for stays the same before they are taken for stuck: all living ranks, or only some, whose
# peer may wait in torch's store, which does not say so.
ALL_STUCK, SOME_STUCK = 5.0, 45.0
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


# ------------------------------------------------------------ scenarios


def train(rank: int, world: int, port: int, folder: Path, scenario: dict[str, Any]) -> dict[str, Any]:
    """A PPO engine runs one mini-batch by each of the scenario's "schedules", one string of letters a rank; a number n:
    1F1B of n micro-batches, actor, then critic."""
    sizes = {key: scenario.get(key, 1) for key in ("pp", "dp", "tp")}
    layouts = {"actor": Parallelism(**sizes), "critic": Layout(**sizes, reverse=scenario.get("reverse", False))}
    groups = Groups.form("127.0.0.1", port, rank, world, layouts, DEADLINE)
    made = counts()
    optimizer = {"offload": "checkpoint" in scenario}
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
    for words in scenario["schedules"]:
        if isinstance(words, int):
            words = encode(serial_1f1b(layouts, dict.fromkeys(models, words), list(models)))
        actions = StoredSchedule("", 1, words).actions()[rank]
        before, steps = counts(), []
        work = {name: micro_batches(words[rank].upper().count("F") // len(models)) for name in engine.models}
        engine.run(actions, work, 1, lambda name, applied, steps=steps: steps.append(name), json.dumps(words))
        torch.cuda.synchronize()
        runs.append({"steps": steps, "used": {name: value - before[name] for name, value in counts().items()}})
    found = {"communicators": made["communicators"], "runs": runs}
    if "checkpoint" in scenario:
        found |= restored(engine, folder / "checkpoint")
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


def _nccl(rank: int, world: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)


def unlike_sizes(rank: int, world: int, port: int, folder: Path, scenario: dict[str, Any]) -> None:
    """Rank 0 sends eight floats, rank 1 receives four."""
    _nccl(rank, world, folder)
    if rank == 0:
        dist.send(torch.zeros(8, device="cuda"), 1)
    else:
        dist.recv(torch.zeros(4, device="cuda"), 0)
    torch.cuda.synchronize()


def unlike_kinds(rank: int, world: int, port: int, folder: Path, scenario: dict[str, Any]) -> None:
    """Rank 0 sums what rank 1 broadcasts."""
    _nccl(rank, world, folder)
    if rank == 0:
        dist.all_reduce(torch.zeros(8, device="cuda"))
    else:
        dist.broadcast(torch.zeros(8, device="cuda"), 1)
    torch.cuda.synchronize()


def crossed(rank: int, world: int, port: int, folder: Path, scenario: dict[str, Any]) -> None:
    """Both ranks send before they receive."""
    _nccl(rank, world, folder)
    dist.send(torch.zeros(8, device="cuda"), 1 - rank)
    dist.recv(torch.zeros(8, device="cuda"), 1 - rank)
    torch.cuda.synchronize()


def missing(rank: int, world: int, port: int, folder: Path, scenario: dict[str, Any]) -> None:
    """Rank 1 goes before the first collective."""
    _nccl(rank, world, folder)
    if rank == 0:
        dist.all_reduce(torch.zeros(8, device="cuda"))


DO = {do.__name__: do for do in (train, unlike_sizes, unlike_kinds, crossed, missing)}


# ------------------------------------------------------------ processes


def child(rank: int, port: int, folder: Path, scenario: dict[str, Any]) -> None:
    """Run one rank in this (forked) process."""
    log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"NULLGPU_RANK": str(rank), "NULLGPU_MEETINGS": str(folder / "meetings")}
    faulthandler.register(signal.SIGUSR1)
    status = 1
    try:
        result = DO[scenario["do"]](rank, scenario["world"], port, folder, scenario)
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def waits(folder: Path) -> dict[str, str]:
    """What ranks wait for, by rank: the null GPU says so after a second."""
    return {
        path.name.removeprefix("waits-"): path.read_text().strip()
        for path in (folder / "meetings").glob("waits-?")
        if path.exists()
    }


def run(folder: Path, scenario: dict[str, Any]) -> dict[str, Any]:
    """All ranks of one scenario, until they end, are stuck, or the deadline has passed."""
    (folder / "meetings").mkdir(parents=True)
    (port,) = free_ports(1)
    pids: dict[int, int] = {}
    for rank in range(scenario["world"]):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            child(rank, port, folder, scenario)
    statuses: dict[int, int] = {}
    started = since = time.monotonic()
    stuck: dict[str, str] = {}
    while len(statuses) < len(pids) and time.monotonic() < started + DEADLINE:
        for rank in set(pids) - set(statuses):
            done, status = os.waitpid(pids[rank], os.WNOHANG)
            if done:
                statuses[rank] = os.waitstatus_to_exitcode(status)
        now = {rank: wait for rank, wait in waits(folder).items() if int(rank) not in statuses}
        if now != stuck:
            stuck, since = now, time.monotonic()
        patience = ALL_STUCK if len(stuck) == len(pids) - len(statuses) else SOME_STUCK
        if stuck and time.monotonic() > since + patience:
            break
        time.sleep(0.05)
    for rank in set(pids) - set(statuses):
        os.kill(pids[rank], signal.SIGUSR1)  # where it stood, for the log
        time.sleep(0.2)
        os.kill(pids[rank], signal.SIGKILL)
        statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
    results = {r: json.loads(p.read_text()) for r in pids if (p := folder / f"result-{r}.json").exists()}
    return {
        "statuses": [statuses[rank] for rank in sorted(pids)],
        "waits": stuck,
        "results": [results.get(rank) for rank in sorted(pids)],
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    folder, scenarios = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    import transformers.models.llama.modeling_llama  # noqa: F401

    for scenario in scenarios:
        found = run(folder / scenario["name"], scenario)
        (folder / f"{scenario['name']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
