"""Programs of trainer ranks."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import peft  # noqa: F401  once for all ranks, as are the layers below
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  once for all ranks
from worker import PATIENCE, Place, free_port

from dovetail.coordinator.schedules.step_commands import serial_1f1b
from dovetail.coordinator.schedules.stored_schedule import StoredSchedule, encode
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec, ScratchModel, Stage
from dovetail.protocol.messages import Heartbeat, HeartbeatReply, Load, ModelRef, Step
from dovetail.protocol.plan import Layout
from dovetail.trainer.command_runner import CommandRunner
from dovetail.trainer.communication.groups import Groups, PeerLost
from dovetail.trainer.engine import checkpoint
from dovetail.trainer.engine.engine import Engine, choose_algorithms
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.engine.optim import OptimizerStep
from dovetail.trainer.packed_batches import Sequences
from dovetail.trainer.profile.links import measure_transfers
from dovetail.trainer.rank.coordinator_client import RankProcess
from dovetail.trainer.rank.heartbeat import HeartbeatThread
from dovetail.trainer.weights.kept_weights import KeptWeights
from helpers.trainer_ranks import job, load_command, ppo_batch

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def micro_batches(count: int, stray: bool = False) -> list[MicroBatch]:
    """Of two shapes, the same on all ranks; the loss computes no sense, as nothing here does. With `stray` it reads
    a number that it does not need."""

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.float().mean()
        if stray:
            value.item()
        return value, {"loss": value.detach()}

    made = []
    for length in itertools.islice(itertools.cycle((9, 12)), count):
        read = torch.ones(2, length, dtype=torch.bool)
        read[:, -1] = False
        packed = Sequences(torch.zeros(2, length, dtype=torch.int64), torch.tensor([length, length])).pack([0, 1], read)
        made.append(MicroBatch(packed, loss))
    return made


def counted(name: str) -> int:
    """One of the null GPU's counts of this process."""
    read = ctypes.CDLL(None).nullgpu_count
    read.restype = ctypes.c_long
    return int(read(name.encode()))


def counts() -> dict[str, int]:
    """What this process has asked of the GPU until now."""
    of_communication = ("communicators", "collectives", "sends", "receives", "mixed")
    of_copies = ("h2d", "h2d_bytes", "d2h", "d2h_beside", "pinned_bytes")
    names = ("launches", "synchronisations", "mallocs", *of_copies, *of_communication)
    return {name: counted(name) for name in names}


def split(words: str) -> str:
    """The order with each backward in two halves: the second half comes after the first half of the next one."""
    made, owed = "", ""
    for letter in words:
        if letter not in "Bb":
            made += letter
            continue
        made += ("I" if letter == "B" else "i") + owed
        owed = "W" if letter == "B" else "w"
        if letter.lower() not in words[len(made) :].lower():
            made, owed = made + owed, ""
    return made + owed


def engine_of(
    place: Place,
    layouts: dict[str, Parallelism],
    offload: bool = False,
    lora: bool = False,
    recompute: bool = False,
    layers: int = 2,
    compiling: bool = False,
    zero3: bool = False,
) -> Engine:
    """A PPO engine with actor and critic, loaded. `layouts`: those of the load."""
    planned = {n: x if world_size(x) == place.world else Parallelism(dp=place.world) for n, x in layouts.items()}
    groups = Groups.form("127.0.0.1", place.port, place.rank, place.world, planned, PATIENCE)
    optimizer = {"offload": offload}
    adapters = {"rank": 4, "dropout": 0.1} if lora else None
    spec = {
        "groups": [{"name": "t", "roles": ["trainer", "rollout"]}],
        "ppo": {"ema": 0.9, "actor_optimizer": optimizer, "critic_optimizer": optimizer},
        "plan": {"sharding": "Always"},  # small as these models are
        "trainer": {"compile": "Auto" if compiling else "Never"},
        "models": {name: {"lora": adapters} for name in layouts},
    }
    engine = Engine(RLHFJobSpec.model_validate(spec), groups)
    scratch = ScratchModel(architecture="llama", config=LLAMA | {"num_hidden_layers": layers})
    models = {
        "actor": ModelRef(head="lm", scratch=scratch, seed=1),
        "critic": ModelRef(head="value", scratch=scratch, seed=2),
    }
    engine.load(
        Load(
            id="load",
            stage="ppo",
            models=models,
            total_steps=4,
            checkpoint=None,
            layouts={name: Layout(**layout.model_dump()) for name, layout in layouts.items()},
            recompute=list(models) if recompute else [],
            zero3=list(models) if zero3 else [],
        )
    )
    assert groups.device == torch.device("cuda", place.rank % torch.cuda.device_count())
    return engine


def train(
    place: Place,
    schedules: list[Any],
    layout: dict[str, int],
    critic: dict[str, Any] | None = None,
    exports: bool = False,
    stray: bool = False,
    gpus: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The engine runs one mini-batch by each of the schedules. A schedule is one string of letters a rank, or a number
    n: 1F1B of n micro-batches, actor, then critic, with "split" backwards in two halves. `critic`: what differs in its
    layout. With "offload" the engine then saves and restores a checkpoint, with `exports` it exports what it holds.
    `gpus`: what all ranks see of the machine's GPUs."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    layouts: dict[str, Parallelism] = {"actor": Layout(**layout), "critic": Layout(**{**layout, **(critic or {})})}
    engine = engine_of(place, layouts, **more)
    groups, made, runs = engine.groups, counts(), []
    for wanted in schedules:
        words = wanted
        if isinstance(wanted, int | dict):
            number = wanted if isinstance(wanted, int) else wanted["split"]
            each = {name: number // sizes.dp for name, sizes in layouts.items()}
            words = encode(serial_1f1b(layouts, each, list(layouts), place.world))
            words = words if isinstance(wanted, int) else [split(word) for word in words]
        actions = StoredSchedule("", 1, words).actions()[place.rank]
        begun = Counter(action.model for action in actions if action.kind == "F" and not action.chunk)
        before, steps = counts(), []
        work = {name: micro_batches(begun[name], stray) for name in engine.models}
        engine.run(actions, work, 1, lambda name, applied, steps=steps: steps.append(name), json.dumps(words))
        torch.cuda.synchronize()
        runs.append({"steps": steps, "used": {name: value - before[name] for name, value in counts().items()}})
    found: dict[str, Any] = {
        "communicators": made["communicators"],
        "runs": runs,
        "receiving": counted("receiving"),
        "staged": [model.staged for model in groups.model.values()],
    }
    if gpus is not None:
        boundary = (torch.Size((1, 8, 64)), torch.bfloat16)
        found["transfers"] = measure_transfers(groups.model, dict.fromkeys(layouts, boundary), groups.device)
    if more.get("offload"):
        found |= restored(engine, place.folder / "checkpoint")
    if exports:
        for model in ("actor", "ema", "critic"):
            engine.export(model, place.folder / model)
    groups.close()
    return found


def backends(place: Place) -> dict[str, Any]:
    """Backends of the groups that only tensors on the GPU go through, and the deadlines of all in seconds."""
    layouts = {name: Parallelism(pp=place.world) for name in ("actor", "critic")}
    groups = Groups.form("127.0.0.1", place.port, place.rank, place.world, layouts, PATIENCE)
    model = groups.model["actor"]
    (edge,) = model.edges
    found = [model.everyone, model.tied, edge.forward_in, edge.forward_out, edge.backward_in, edge.backward_out]
    names = [str(dist.get_backend_config(group)) for group in found if group is not None]
    every = [*found, *(model.mesh.get_group(name) for name in model.mesh.mesh_dim_names or ())]
    deadlines = [g._get_backend(groups.device).options._timeout.total_seconds() for g in every if g is not None]
    groups.close()
    return {"backends": names, "deadlines": deadlines}


def placed_again(place: Place, times: int) -> list[int]:
    """The critic's stages change their direction so often, while other code takes streams of torch's pool. Returns how
    many messages of actor and critic were then on a stream with another communicator's."""
    layouts: dict[str, Parallelism] = {name: Layout(pp=place.world) for name in ("actor", "critic")}
    groups = Groups.form("127.0.0.1", place.port, place.rank, place.world, layouts, PATIENCE)
    found = []
    for number in range(times):
        groups.place("critic", Layout(pp=place.world, reverse=number % 2 == 0))
        others = [torch.cuda.Stream() for _ in range(30)]
        begun = []
        for turn in range(2):
            before = counted("mixed")
            for model in layouts:
                (edge,) = groups.model[model].edges
                message = torch.zeros(8, device=groups.device)
                if edge.next is not None:
                    begun.append(dist.isend(message, edge.next, group=edge.forward_out))
                    begun.append(dist.irecv(message, edge.next, group=edge.backward_in))
                if edge.previous is not None:
                    begun.append(dist.irecv(message, edge.previous, group=edge.forward_in))
                    begun.append(dist.isend(message, edge.previous, group=edge.backward_out))
            for work in begun:
                work.wait()
            torch.cuda.synchronize()
            if turn:
                found.append(counted("mixed") - before)
        del others
    groups.close()
    return found


def loses_a_peer(place: Place, told: bool, pp: int = 1, dp: int = 1) -> Any:
    """Rank 1 stops in its first forward pass. Rank 0 hears it from the coordinator if `told`. Else a wait of its GPU
    passes the groups' deadline, of two seconds. Returns what rank 0 raised, and the world that it then forms."""
    layouts = {name: Parallelism(pp=pp, dp=dp) for name in ("actor", "critic")}
    engine = engine_of(place, layouts)
    stopped, over = place.folder / "stopped", place.folder / "over"

    def stop(*_: Any) -> None:
        stopped.touch()
        while not told and not over.exists():
            time.sleep(0.01)
        os._exit(3)

    class Coordinator:
        def heartbeat(self, _: Heartbeat) -> HeartbeatReply:
            lost = told and stopped.exists()
            return HeartbeatReply(generation=2 if lost else 1, reason="trainer-1 joined again" if lost else "")

    if place.rank:
        engine.models["actor"].module.register_forward_pre_hook(stop)
    groups = engine.groups
    events: list[str] = []
    beats: Any = Coordinator()
    heartbeat = HeartbeatThread(RankProcess("trainer-0", beats, lambda event, **_: events.append(event)), 0, "a")
    if not place.rank:
        groups.timeout = timedelta(seconds=2)
        heartbeat.enter(1, PATIENCE, groups)
        heartbeat.start()
    actions = serial_1f1b(layouts, dict.fromkeys(layouts, 2), list(layouts))[place.rank]
    error = ""
    try:
        with groups.naming_the_lost():
            engine.run(actions, {name: micro_batches(2) for name in layouts}, 1, lambda *_: None)
    except PeerLost as lost:
        error = str(lost)
    heartbeat.leave()
    heartbeat.stop()
    over.touch()
    groups.close()
    again = Groups.form("127.0.0.1", free_port(), 0, 1, {"actor": Parallelism()}, PATIENCE)
    found = {"error": error, "events": events, "world": again.world_size}
    again.close()
    return found


def spans(place: Place) -> dict[str, tuple[float, float]]:
    """Two stages train on two micro-batches. The first stage sends its first message half a second late. Returns when
    each action began and ended."""
    layouts = {name: Parallelism(pp=2) for name in ("actor", "critic")}
    engine = engine_of(place, layouts)
    found: dict[str, tuple[float, float]] = {}
    engine.record = lambda name, start, end: found.update({name: (start, end)})
    if place.rank == 0:
        late = [0.5, 0.0]
        engine.models["actor"].module.register_forward_pre_hook(lambda *_: time.sleep(late.pop(0)))
    actions = serial_1f1b(layouts, dict.fromkeys(layouts, 2), list(layouts))[place.rank]
    engine.run(actions, {name: micro_batches(2) for name in layouts}, 1, lambda *_: None)
    engine.groups.close()
    return found


def iterations(place: Place, pp: int = 1, dp: int = 1) -> list[dict[str, int]]:
    """What each of three PPO iterations asks of the GPU: old log-probabilities, two epochs of two mini-batches."""
    layouts = {name: Parallelism(pp=pp, dp=dp) for name in ("actor", "critic")}
    groups = Groups.form("127.0.0.1", place.port, place.rank, place.world, layouts, PATIENCE)
    spec = job(plan={"sharding": "Always"}, trainer={"compile": "Never"}).spec
    client: Any = SimpleNamespace(batch=lambda *_: ppo_batch(1))
    choose_algorithms(spec.trainer.deterministic)
    runner = CommandRunner(
        RankProcess("trainer", client, lambda event, **fields: print(event, fields)), spec, groups, {}
    )
    per_step = spec.ppo.mini_batch_size // spec.ppo.micro_batch_size
    actions = serial_1f1b(layouts, dict.fromkeys(layouts, per_step // dp), list(layouts))
    found = []
    assert runner.execute(load_command(Stage.PPO)).ok
    for number in (1, 2, 3):
        before = counts()
        step = Step(id=f"step/{number}", stage=Stage.PPO, step=number, batch="b", actions=actions, mini_batches=1)
        result = runner.execute(step)
        assert result.ok, result.error
        runner.engine.settle()
        found.append({name: value - before[name] for name, value in counts().items()})
    groups.close()
    return found


def versions(place: Place) -> dict[str, Any]:
    """Two PPO steps of a rank that keeps two versions of the weights. What keeping the last one asks of the GPU, in
    order: which copies to the host begin, and which layers the optimizer step is applied to."""
    layouts = {name: Parallelism() for name in ("actor", "critic")}
    groups = Groups.form("127.0.0.1", place.port, 0, 1, layouts, PATIENCE)
    spec = job(trainer={"compile": "Never"}).spec
    client: Any = SimpleNamespace(batch=lambda *_: ppo_batch(1))
    runner = CommandRunner(
        RankProcess("trainer", client, lambda event, **fields: print(event, fields)), spec, groups, {}
    )
    assert runner.execute(load_command(Stage.PPO).model_copy(update={"keep_versions": 2})).ok
    per_step = spec.ppo.mini_batch_size // spec.ppo.micro_batch_size
    actions = serial_1f1b(layouts, dict.fromkeys(layouts, per_step), list(layouts))
    order: list[str] = []
    apply, begin = OptimizerStep.apply, KeptWeights._begin_copy

    def applied(step: OptimizerStep, names: Any) -> None:
        if step._left:
            order.append("step")
        apply(step, names)

    def begun(kept: KeptWeights, *tensors: torch.Tensor) -> None:
        order.append("copy")
        begin(kept, *tensors)

    found = []
    for number in (1, 2):
        step = Step(id=f"step/{number}", stage=Stage.PPO, step=number, batch="b", actions=actions, mini_batches=1)
        order.clear()
        before = counts()
        with patch.object(OptimizerStep, "apply", applied), patch.object(KeptWeights, "_begin_copy", begun):
            result = runner.execute(step)
        assert result.ok, result.error
        found.append({name: value - before[name] for name, value in counts().items()})
    pinned = []
    for version in runner.kept.versions:
        with runner.kept.using(version) as kept:
            pinned += [] if kept is None else [copy.is_pinned() for copy in kept.copies.values()]
    ended = {"versions": runner.kept.versions, "used": found[-1], "order": order, "pinned": pinned}
    groups.close()
    return ended


def gpu_fails(place: Place, during: str) -> dict[str, Any]:
    """A rank alone, whose GPU fails `during` a step or a load. What the rank raised, what the last result said, and
    whether the groups still answer the heartbeat thread."""
    layouts = {name: Parallelism() for name in ("actor", "critic")}
    groups = Groups.form("127.0.0.1", place.port, 0, 1, layouts, PATIENCE)
    spec = job(trainer={"compile": "Never"}).spec
    client: Any = SimpleNamespace(batch=lambda *_: ppo_batch(1))
    runner = CommandRunner(
        RankProcess("trainer", client, lambda event, **fields: print(event, fields)), spec, groups, {}
    )
    actions = serial_1f1b(layouts, dict.fromkeys(layouts, 4), list(layouts))

    def fail() -> None:
        ctypes.CDLL(None).fail(b"an uncorrectable ECC error")

    found: dict[str, Any] = {"raised": "", "result": None}
    try:
        if during == "load":
            fail()
        found["result"] = runner.execute(load_command(Stage.PPO)).error
        runner.engine.models["critic"].module.register_forward_pre_hook(lambda *_: fail())
        groups.awaiting("nobody")
        step = Step(id="step/1", stage=Stage.PPO, step=1, batch="b", actions=actions, mini_batches=1)
        found["result"] = runner.execute(step).error
    except Exception as error:
        found["raised"] = f"{type(error).__name__}: {error}"
    return found | {"overdue": groups.overdue()}


def restored(engine: Engine, path: Path) -> dict[str, Any]:
    """Give the moments in host memory values, save, wipe and restore: which lost theirs."""
    moments = {}
    for model, held in engine.models.items():
        for number, (name, pair) in enumerate(held.optimizer.moments.items(), 1):
            # What tp ranks share has one value, shards have unlike ones.
            value = number + held.dp_rank / 2 + (held.groups.tp_rank / 4 if name in held.split.shared else 0)
            moments |= {f"{model}.{name}.{i}": (moment, value + i * 1000) for i, moment in enumerate(pair)}
    assert all(moment.is_pinned() or not moment.numel() for moment, _ in moments.values())
    for moment, value in moments.values():
        moment.fill_(value)
    engine.save(path)
    for moment, _ in moments.values():
        moment.zero_()
    checkpoint.restore(engine, path)
    lost = [name for name, (moment, value) in moments.items() if not torch.all(moment == value)]
    return {"moments": len(moments), "lost": lost}
