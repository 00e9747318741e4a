"""Trainer ranks that divide the experts of each layer, for test_expert_parallel.py; as `engine_worker.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_worker as base
import torch
import torch.distributed as dist
from context_parallel_worker import EPS, halves, small_scratch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.types import Parallelism
from dovetail.models import PipelineStage, load_config
from dovetail.models.build import build_stage, fill, local_part, open_source
from dovetail.models.layers.expert_ranks import divide_experts
from dovetail.models.recompute import recompute
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.plan import Layout
from dovetail.trainer.communication.groups import Groups, RankFailed
from dovetail.trainer.engine.engine import Engine
from helpers.family_models import ref

# The actor's (pp, dp, cp, ep, pipelines), and whether stages are sharded over dp.
LAYOUTS = {
    1: [(1, 1, 1, 1, 1, True)],
    2: [(1, 2, 1, 2, 1, True), (1, 2, 1, 2, 1, False), (1, 2, 2, 2, 1, True)],
    4: [
        (1, 4, 1, 2, 1, True),
        (1, 4, 1, 4, 1, True),
        (1, 4, 1, 2, 1, False),
        (2, 2, 1, 2, 1, True),
        (1, 4, 2, 4, 1, False),
        (1, 4, 1, 2, 2, False),
        (1, 4, 1, 2, 2, True),
    ],
}
ACTOR = ref("qwen3_moe", num_experts=4)
KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


def form(rank: int, world: int, port: int, layout: tuple[Any, ...]) -> Groups:
    """The critic has no experts."""
    pp, dp, cp, ep, pipelines, _ = layout
    actor = Layout(pp=pp, dp=dp, cp=cp, ep=ep, pipelines=pipelines)
    layouts: dict[str, Parallelism] = {"actor": actor, "critic": actor.model_copy(update={"ep": 1})}
    return Groups.form("127.0.0.1", port, rank, world, layouts, 900.0)


def training(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """The engine under one layout, and what it refuses."""
    case = os.environ["CASE"].removeprefix("-")
    layout = LAYOUTS[world][int(case)]
    groups = form(rank, world, next(ports), layout)
    kind = {} if layout[-1] else base.WHOLE
    engine = Engine(base.spec(EPS, **kind), groups)
    out = base.full_training(engine, folder, f"{world}-{case}", actor=ACTOR)
    if world < 4:
        out["zero3"] = one_model(Engine(base.spec(EPS), groups), ACTOR, zero3=True)
        for name in ("deepseek_v3", "gpt_oss"):
            out[name] = one_model(engine, ModelRef(head="lm", scratch=small_scratch(name), seed=3))
        balanced = Engine(base.spec(EPS, models={"actor": {"routerAuxLossCoef": 0.1}}, **kind), groups)
        out["balanced"] = one_model(balanced, ACTOR)
        adapted = Engine(base.spec(EPS, models={"actor": {"lora": {"rank": 4}}}, **kind), groups)
        out["adapters"] = one_model(adapted, ACTOR)
        low = {"dtype": "bfloat16"}
        out["bfloat16"] = one_model(Engine(base.spec(EPS, models={"actor": low, "critic": low}), groups), ACTOR)
    if layout[0] > 1:
        out["halves"] = halves(engine, ACTOR)
    if world == 2:
        engine.load(base.load_command(str(folder / "checkpoint-1-0"), ACTOR))
        out["resumed"] = base.weights(engine)
        out["refused"] = refused(groups)
    groups.close()
    return out


def one_model(engine: Engine, actor: ModelRef, zero3: bool = False) -> dict[str, Any]:
    """Weights after two steps of such an actor."""
    engine.load(base.load_command(actor=actor, zero3=zero3))
    log = base.train(engine, range(1, 3))
    return {"log": log, "at_two": base.weights(engine), "parts_agree": base.parts_agree(engine)}


def refused(groups: Any) -> dict[str, str]:
    out = {}
    on_experts = {"models": {"actor": {"lora": {"targetModules": ["experts.down_proj"]}}}}
    cases: dict[str, tuple[ModelRef, dict[str, Any]]] = {
        "dense": (ref("llama"), {}),
        "experts": (ref("qwen3_moe", num_experts=3), {}),
        "adapters": (ACTOR, on_experts),
    }
    for name, (actor, changes) in cases.items():
        try:
            Engine(base.spec(**changes), groups).load(base.load_command(actor=actor))
        except RankFailed as failed:
            out[name] = str(failed)
    return out


def after(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """One rank goes on from checkpoints of several."""
    groups = form(rank, world, next(ports), LAYOUTS[1][0])
    out = {}
    for path in sorted(folder.glob("checkpoint-[24]-*")):
        engine = Engine(base.spec(EPS), groups)
        engine.load(base.load_command(str(path), ACTOR))
        out[path.name.removeprefix("checkpoint-")] = {"at_two": base.weights(engine)}
        base.train(engine, range(3, 5))
        out[path.name.removeprefix("checkpoint-")]["end"] = base.weights(engine)
    groups.close()
    return out


def passes(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    return alike(KINDS, rank, world, next(ports))


def every_family(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    kinds = [kind for kind, family in MODEL_FAMILIES.items() if family.experts or family.matrices]
    return alike(kinds, rank, world, next(ports))


def alike(kinds: Any, rank: int, world: int, port: int) -> dict[str, Any]:
    """By how much, of the largest number, logits and gradients on 2 and on all ranks differ from a whole model's; also
    with activation checkpointing."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    out: dict[str, Any] = {}
    for kind in kinds:
        of = ModelRef(head="lm", scratch=small_scratch(kind), seed=3)
        for size in (2, world):
            at = rank // size * size, size
            grid = torch.arange(world).view(-1, size)
            stage = divided_stage(of, DeviceMesh("cpu", grid, mesh_dim_names=("dp", "ep"))["ep"])
            out[f"{kind} {size}"] = unlike(of, stage, rank, *at)
            recompute(stage.train())
            out[f"{kind} {size} again"] = unlike(of, stage, rank, *at)
            if stage.family.softmax_routers and stage.family.packs:
                # All tokens go to the first rank's experts.
                out[f"{kind} {size} idle"] = unlike(of, stage, rank, *at, crowded=True)
    return out


def divided_stage(of: ModelRef, mesh: Any) -> PipelineStage:
    stage = PipelineStage(load_config(of), of.head)
    divide_experts(stage, mesh)
    stage.to_empty(device="cpu")
    fill(stage, open_source(of, stage), {name: name for name, _ in stage.named_parameters()})
    stage.place_buffers("cpu")
    return stage


def unlike(
    of: ModelRef, stage: PipelineStage, rank: int, first: int, size: int, crowded: bool = False
) -> tuple[float, float]:
    """Each rank has sequences of its own."""
    alone, found = build_stage(of), list[tuple[Tensor, Tensor]]()
    for name, parameter in [*alone.named_parameters(), *stage.named_parameters()]:
        parameter.grad = None
        parameter.requires_grad_(name not in alone.constants)
    logits = None
    for each in range(first, first + size):
        theirs = passed(alone, each, crowded)
        logits = theirs if each == rank else logits
    mine = passed(stage, rank, crowded)
    assert logits is not None
    for name, parameter in stage.named_parameters():
        expected, got = alone.get_parameter(name).grad, parameter.grad
        if name in alone.constants:
            continue
        assert (expected is None) == (got is None), name
        if expected is None or got is None:
            continue
        _, box = local_part(parameter)
        if hasattr(got, "to_local"):
            got = got.to_local()
        else:
            alls = [torch.empty_like(got) for _ in range(dist.get_world_size())]
            dist.all_gather(alls, got)
            got = torch.stack(alls[first : first + size]).sum(0)
        found.append((got.flatten(), expected[box].flatten()))
    a, b = (torch.cat(each) for each in zip(*found, strict=True))
    return float((mine - logits).abs().max() / logits.abs().max()), float((a - b).abs().max() / b.abs().max())


def passed(stage: PipelineStage, rank: int, crowded: bool) -> Tensor:
    """The logits of the sequences of `rank`; and a backward pass."""
    lengths = (9 + rank, 2, 12 - 3 * rank)
    drawn = torch.Generator().manual_seed(rank)
    tokens = torch.randint(3, 60, (1, sum(lengths)), generator=drawn)
    routing = None
    if crowded:
        routing = torch.arange(2).expand(sum(lengths), stage.config.num_hidden_layers, 2)
    logits: Tensor = stage(tokens, lengths, routing=routing)
    logits.log_softmax(-1)[..., 7].sum().backward()
    return logits.detach()


base.SCENARIOS = {f.__name__: f for f in (training, after, passes, every_family)}

if __name__ == "__main__":
    base.main()
