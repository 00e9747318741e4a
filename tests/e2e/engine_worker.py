"""The trainer ranks of the engine's tests: `python engine_worker.py <folder> <phases as JSON>`.

A scenario is a function below; what it returns goes to <folder>/<scenario>-<world>-<rank>.pt."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts_check import parts_agree
from torch.nn import functional as F

from dovetail.launch.ports import PortReservation
from dovetail.manifest.types import Parallelism, RLHFJobSpec, ScratchModel
from dovetail.protocol.messages import Action, Load, ModelRef
from dovetail.trainer.communication.groups import Groups, PeerLost, RankFailed
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.engine.optim import local
from dovetail.trainer.packed_batches import Sequences

DEADLINE = 1200.0
# Nobody else gets them until this process ends.
PORTS = PortReservation()
# After so many seconds without any news from its peer a rank gives up.
LOST_SECONDS = 600.0
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


def spec(eps: float = 1e-8, **changes: Any) -> RLHFJobSpec:
    """`eps`: Adam's."""
    optimizer = {"learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1, "eps": eps}
    ppo = {"actor_optimizer": optimizer, "critic_optimizer": optimizer, "ema": 0.9}
    fields: dict[str, Any] = {"groups": [{"name": "t", "roles": ["trainer", "rollout"]}], "ppo": ppo}
    fields["plan"] = {"sharding": "Always"}  # small as these models are
    return RLHFJobSpec.model_validate(fields | changes)


def load_command(checkpoint: str | None = None, actor: ModelRef | None = None, zero3: bool = False) -> Load:
    scratch = ScratchModel(architecture="llama", config=LLAMA)
    models = {
        "actor": actor or ModelRef(head="lm", scratch=scratch, seed=1),
        "critic": ModelRef(head="value", scratch=scratch, seed=2),
    }
    gathered = list(models) if zero3 else []
    return Load(id="load", stage="ppo", models=models, total_steps=10, checkpoint=checkpoint, zero3=gathered)


def form(
    rank: int, world: int, port: int, pp: int, dp: int, *, timeout: float = 900.0, tp: int = 1, cp: int = 1
) -> Groups:
    layout = Parallelism(pp=pp, dp=dp, tp=tp, cp=cp)
    return Groups.form("127.0.0.1", port, rank, world, {"actor": layout, "critic": layout}, timeout)


def global_batch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four micro-batches of unlike shapes, the same on all ranks. Shapes are the same in every step: tensor parallel
    passes take ten times as long with one that is new."""
    shapes = [(2, 9), (3, 5), (1, 12), (2, 7)]
    gen, lengths = torch.Generator().manual_seed(step), torch.Generator().manual_seed(0)
    return [
        (torch.randint(0, VOCAB, (b, t), generator=gen), torch.randint(2, t + 1, (b,), generator=lengths))
        for b, t in shapes
    ]


def micro_batches(head: str, step: int, dp_rank: int, dp_size: int) -> list[MicroBatch]:
    """This dp rank's share, each loss divided by the sequences of the whole mini-batch."""
    batch = global_batch(step)
    total = sum(tokens.shape[0] for tokens, _ in batch)

    return [micro_batch(head, *item, total) for item in batch[dp_rank::dp_size]]


def micro_batch(head: str, tokens: torch.Tensor, lengths: torch.Tensor, total: int) -> MicroBatch:
    """A cross entropy or squared error, or the sum of both, divided by `total` sequences."""
    # A sequence's last token predicts nothing.
    read = torch.arange(tokens.shape[1])[None] < lengths[:, None] - int(head != "value")
    packed = Sequences(tokens, lengths).pack(range(len(tokens)), read)

    def loss(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits, values = output if head == "lm+value" else (output, output)
        value = torch.zeros(())
        if head != "value":
            value = value + F.cross_entropy(logits, packed.targets, reduction="none").sum()
        if head != "lm":
            value = value + (values - tokens[read] / VOCAB).square().sum()
        value = value / total
        return value, {"loss": value.detach(), "count": torch.tensor(float(tokens.shape[0]))}

    return MicroBatch(packed, loss)


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
            name: micro_batches(model.head, step, model.dp_rank, model.dp_size) for name, model in engine.models.items()
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
    return {f"{m}.{n}": local(p).clone() for m, e in engine.models.items() for n, p in e.trainable().items()}


# ------------------------------------------------------------ scenarios

LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(2, 2)]}
WHOLE = {"plan": {"sharding": "Auto"}}


def training(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """Train under every layout, continue from the checkpoint, load it into the other layout, train adapters."""
    out: dict[str, Any] = {}
    for pp, dp in LAYOUTS[world]:
        key = f"{pp}x{dp}"
        groups = form(rank, world, next(ports), pp, dp)
        out[key] = full_training(Engine(spec(), groups), folder, key)
        if world < 4:
            out[key]["bfloat16"] = mixed_training(groups, folder / f"bfloat16-{key}")
            out[key]["lora"] = lora_training(groups, folder, key, exported(folder), 0.3)
            out[key]["disk"] = full_disk(groups, folder / f"refused-{key}")
        if dp > 1:
            out[f"{key} whole"] = full_training(Engine(spec(**WHOLE), groups), folder, f"{key} whole")
            out[f"{key} zero3"] = full_training(Engine(spec(**WHOLE), groups), folder, f"{key} zero3", zero3=True)
            out[f"{key} zero3"]["unlike"] = unlike_under_zero3(groups, folder)
        if world == 4:
            out[key]["unlike_if_staged"] = unlike_if_staged(groups)
        groups.close()
    sources = [(2, 1, "1x2"), (1, 2, "2x1"), (1, 2, "1x2 whole"), (2, 1, "1x2 zero3")]
    for pp, dp, source in sources if world == 2 else ():
        groups = form(rank, world, next(ports), pp, dp)
        engine = Engine(spec(), groups)
        engine.load(load_command(str(folder / f"checkpoint-{source}")))
        out[f"{source} in {pp}x{dp}"] = {"step": engine.step, "at_two": weights(engine)}
        train(engine, range(3, 5))
        out[f"{source} in {pp}x{dp}"]["end"] = weights(engine)
        groups.close()
    return out


def full_training(
    engine: Engine, folder: Path, key: str, zero3: bool = False, actor: ModelRef | None = None
) -> dict[str, Any]:
    engine.load(load_command(actor=actor, zero3=zero3))
    log = train(engine, range(1, 3))
    path = folder / f"checkpoint-{key}"
    engine.save(path)
    for name in ("actor", "critic", "ema"):
        engine.export(name, folder / f"{name}-{key}")
    batches = micro_batches("lm", 9, 0, 1)
    read = engine.forward("actor", batches, lambda logits, _: logits.logsumexp(-1).float())
    at_two = weights(engine)
    log += train(engine, range(3, 5))
    end = shards(engine)
    out = {"log": log, "at_two": at_two, "read": [r.clone() for r in read], "end": weights(engine), "shards": end}
    out["parts_agree"] = parts_agree(engine)

    for name, again in (("replay_is_exact", []), ("recompute_is_exact", ["actor", "critic"])):
        engine.load(load_command(str(path), actor, zero3).model_copy(update={"recompute": again}))
        assert engine.step == 2
        train(engine, range(3, 5))
        out[name] = same(end, shards(engine))

    engine.load(load_command(actor=actor, zero3=zero3))
    out["schedule_is_free"] = train(engine, range(1, 5), interleaved=True) == log and same(end, shards(engine))
    return out


def exported(folder: Path) -> ModelRef:
    """The model that one rank trained."""
    return ModelRef(head="lm", path=str(folder / "actor-1x1"))


def unlike_under_zero3(groups: Groups, folder: Path) -> list[str]:
    """What ZeRO-3 does not train to the same bits as ZeRO-2 and as whole copies do, of steps with one micro-batch a
    rank. (With more, ZeRO-3 adds up the ranks before the micro-batches, and the others after them.) Nothing is clipped:
    norms of whole copies and of shards differ by rounding."""
    optimizer = {"learning_rate": 1e-2, "max_grad_norm": 1e6, "weight_decay": 0.1}
    ppo = {"actor_optimizer": optimizer, "critic_optimizer": optimizer, "ema": 0.9}
    source = exported(folder)
    ways: dict[str, dict[str, Any]] = {
        "float32": {},
        "bfloat16": {"models": {name: {"dtype": "bfloat16"} for name in ("actor", "critic")}},
        "adapters": {"models": {"actor": {"lora": {"rank": 4, "dropout": 0.3}}}},
    }
    found = []
    for way, changes in ways.items():
        ends = []
        for fields, zero3 in ((WHOLE, False), ({}, False), ({}, True)):
            engine = Engine(spec(**fields, **changes, ppo=ppo), groups)
            engine.load(load_command(actor=source, zero3=zero3))
            for step in (1, 2):
                work = {n: micro_batches(m.head, step, m.dp_rank, m.dp_size)[:1] for n, m in engine.models.items()}
                engine.run(serial_actions(engine, 1), work)
                for name in engine.models:
                    engine.optimizer_step(name)
            ends.append({f"{m}/{n}": t for m, named in weights(engine).items() for n, t in named.items()})
        found += [way] if not (same(ends[0], ends[2]) and same(ends[1], ends[2])) else []
    return found


def unlike_if_staged(groups: Groups) -> list[str]:
    """The weights that get other bits if messages take the way of ranks that share a GPU, through host memory."""
    ends = []
    for staged in (False, True):
        engine = Engine(spec(), groups)
        engine.load(load_command())
        for held in engine.models.values():
            held.groups.staged = staged
        train(engine, range(1, 3))
        ends.append(shards(engine))
    for held in engine.models.values():
        held.groups.staged = False
    return [name for name, tensor in ends[0].items() if not torch.equal(_plain(tensor), _plain(ends[1][name]))]


def mixed_training(groups: Groups, path: Path) -> dict[str, Any]:
    """bfloat16 kernels over float32 master weights."""
    dtype = {"dtype": "bfloat16"}
    engine = Engine(spec(models={"actor": dtype, "critic": dtype}), groups)
    engine.load(load_command())
    log = train(engine, range(1, 4))
    engine.export("actor", path)
    return {"log": log, "dtypes": {str(p.dtype) for p in shards(engine).values()}}


def lora_training(
    groups: Groups, folder: Path, key: str, source: ModelRef, *dropouts: float, targets: Sequence[str] = ()
) -> dict[str, Any]:
    """Adapters on the actor; dropout only for the exact replay."""
    out: dict[str, Any] = {}
    for dropout in (0.0, *dropouts):
        adapters = {"rank": 4, "dropout": dropout, "targetModules": targets}
        engine = Engine(spec(models={"actor": {"lora": adapters}}), groups)
        engine.load(load_command(actor=source))
        base = {n: p for n, p in engine.models["actor"].module.named_parameters() if not p.requires_grad}
        before = {n: p.detach().clone() for n, p in base.items()}
        out.setdefault("start", weights(engine))
        train(engine, range(1, 2))
        path = folder / f"lora-checkpoint-{key}"
        engine.save(path)
        log = train(engine, range(2, 4))
        end = shards(engine)
        out.setdefault("end", weights(engine))
        out["parts_agree"] = parts_agree(engine)
        out.setdefault("log", log)
        out.setdefault("read", [r.clone() for r in engine.forward("actor", micro_batches("lm", 9, 0, 1), _logits)])
        if dropout == 0.0:
            engine.export("actor", folder / f"lora-{key}")
        out["base_is_frozen"] = same(before, {n: p.detach() for n, p in base.items()})
        engine.load(load_command(str(path), actor=source))
        train(engine, range(2, 4))
        out[f"replay_is_exact_{dropout}"] = same(end, shards(engine))
    return out


def _logits(logits: torch.Tensor, _: MicroBatch) -> torch.Tensor:
    return logits.clone()


def full_disk(groups: Groups, path: Path) -> dict[str, Any]:
    """The last rank may write no file above 4 KiB: nobody keeps anything, and all know why."""
    engine = Engine(spec(), groups)
    engine.load(load_command())
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    out: dict[str, Any] = {}
    for name, write in (("save", engine.save), ("export", lambda p: engine.export("actor", p))):
        if groups.rank == groups.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            write(path)
            out[name] = "written"
        except RankFailed as failed:
            out[name] = str(failed)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        groups.barrier()
        out[f"{name}_left"] = [p.name for p in path.parent.glob(path.name + "*")]
        groups.barrier()  # nobody starts the next write while another still looks
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(_plain(a[name]), _plain(b[name])) for name in a)


def _plain(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


CASES = [("pp", "kill"), ("dp", "kill"), ("pp", "stop"), ("pp", "none")]


def survivor(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """Rank 0 in one process through all cases: each time its peer is lost in the middle of step 3, except the last."""
    out: dict[str, Any] = {}
    for axis, fault in CASES:
        groups = form(rank, world, next(ports), *_layout(axis), timeout=10.0 if fault == "stop" else LOST_SECONDS)
        engine = Engine(spec(), groups)
        engine.load(load_command(_checkpoint(folder, axis)))
        start = time.monotonic()
        try:
            train(engine, range(3, 5))
            out[f"{axis}-{fault}"] = shards(engine)
        except PeerLost as lost:
            out[f"{axis}-{fault}"] = (str(lost), time.monotonic() - start)
        groups.close()
    return out


def victim(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """Rank 1 of one case, given by the environment."""
    axis, fault = CASES[int(os.environ["CASE"])]
    groups = form(rank, world, list(ports)[int(os.environ["CASE"])], *_layout(axis), timeout=LOST_SECONDS)
    engine = Engine(spec(), groups)
    engine.load(load_command(_checkpoint(folder, axis)))
    if fault != "none":
        module, calls = engine.models["critic"].module, 0
        inner = module.forward

        def forward(inputs: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            return inner(inputs, *rest, **named)

        module.forward = forward
    train(engine, range(3, 5))
    return {"end": shards(engine)}


def lazy(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """A pipeline whose edges are as NCCL makes them: the first message of a group waits until the other rank has called
    as well, whichever way its message goes. Point-to-point messages and collectives have communicators of their own."""
    made: set[int] = set()

    def patient(call: Callable[..., Any]) -> Callable[..., Any]:
        def meet_first(tensor: torch.Tensor, *places: Any, group: Any = None, **named: Any) -> Any:
            if id(group) not in made:
                made.add(id(group))
                real["all_reduce"](torch.zeros(1), group=group)
            return call(tensor, *places, group=group, **named)

        return meet_first

    names = ("send", "recv", "isend", "irecv")
    real = {name: getattr(dist, name) for name in (*names, "all_reduce")}
    for name in names:
        setattr(dist, name, patient(real[name]))
    groups = form(rank, world, next(ports), world, 1, timeout=120.0)
    try:
        engine = Engine(spec(), groups)
        engine.load(load_command())
        return {"log": train(engine, range(1, 3))}
    finally:
        groups.close()


def _layout(axis: str) -> tuple[int, int]:
    return (2, 1) if axis == "pp" else (1, 2)


def _checkpoint(folder: Path, axis: str) -> str:
    return str(folder / f"checkpoint-{'x'.join(map(str, _layout(axis)))}")


SCENARIOS = {f.__name__: f for f in (training, survivor, victim, lazy)}


def child(job: dict[str, Any], ports: list[int], folder: Path) -> None:
    """Run one rank in this (forked) process."""
    name = f"{job['scenario']}-{job['world']}-{job['rank']}{job.get('case', '')}"
    log = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        os.environ["CASE"] = str(job.get("case", ""))
        result = SCENARIOS[job["scenario"]](job["rank"], job["world"], iter(ports), folder)
        torch.save(result, folder / f"{name}.pt")
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_together(jobs: list[dict[str, Any]], folder: Path) -> list[int]:
    """Fork a process for each job; once every job that counts has ended (or one of them failed), kill the others.
    Returns exit statuses, negative for signals."""
    ports = list(PORTS.reserve(str(number) for number in range(6)).values())
    pids = []
    gc.freeze()  # keeps the ranks' collectors from touching, and so copying, the shared pages
    for job in jobs:
        pid = os.fork()
        if pid == 0:
            child(job, ports, folder)
        pids.append(pid)
    statuses: dict[int, int] = {}
    end = time.monotonic() + DEADLINE
    counted = {pid for pid, job in zip(pids, jobs, strict=True) if job["scenario"] != "victim"}
    while not counted <= set(statuses) and time.monotonic() < end and not any(statuses.get(p) for p in counted):
        for pid in set(pids) - set(statuses):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in set(pids) - set(statuses):
        os.kill(pid, signal.SIGKILL)
        statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [statuses[pid] for pid in pids]


def main() -> None:
    """Arguments: folder, JSON list of phases, each a list of jobs. One import of torch serves all ranks."""
    folder, phases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    results = []
    for jobs in phases:
        results.append(run_together(jobs, folder))
        counted = [s for s, job in zip(results[-1], jobs, strict=True) if job["scenario"] != "victim"]
        if any(counted):
            break
    (folder / "statuses.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
