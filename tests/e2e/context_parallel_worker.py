"""Trainer ranks that share the tokens of sequences, for test_context_parallel.py; as `engine_worker.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_worker as base
import torch
import torch.distributed as dist

from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.types import ScratchModel
from dovetail.models.build import build_stage
from dovetail.models.derive import usual_config
from dovetail.models.layers.token_ranks import TokenRanks
from dovetail.protocol.messages import Action, ModelRef
from dovetail.tools.model_check import small_copy
from dovetail.trainer.communication.groups import RankFailed
from dovetail.trainer.engine.engine import Engine
from helpers.family_models import FAMILIES, ref

# With Adam's default, gradients near zero move weights by the learning rate times a share that is their rounding.
EPS = 1e-5
# (pp, dp, tp, cp), and whether stages are sharded over dp.
LAYOUTS = {
    1: [(1, 1, 1, 1, True)],
    2: [(1, 2, 1, 2, True), (1, 2, 1, 2, False)],
    4: [(1, 4, 1, 2, True), (1, 4, 1, 4, True), (2, 2, 1, 2, False)],
    8: [(2, 2, 2, 2, True)],
}
ADAPTED = ("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")
# Packed rows of unlike and of equal lengths, whose sequences lie on several ranks.
ROWS = ((9, 2, 12), (8, 8), (5,))


def training(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """The engine under one layout, and what it refuses. Another layout needs other processes: torch keeps the groups of
    a mesh of the same ranks."""
    pp, dp, tp, cp, sharded = LAYOUTS[world][int(os.environ["CASE"].removeprefix("-"))]
    key = f"{pp}x{dp}x{tp}x{cp}{'' if sharded else ' whole'}"
    groups = base.form(rank, world, next(ports), pp, dp, tp=tp, cp=cp)
    kind = {} if sharded else base.WHOLE
    engine = Engine(base.spec(EPS, **kind), groups)
    out: dict[str, Any] = {}
    if world < 4:
        out |= base.full_training(engine, folder, key)
        out["both heads"] = one_model(engine, ref("llama", "lm+value"))
        out["adapters"] = base.lora_training(groups, folder, key, ref("qwen3_moe"), targets=ADAPTED)
        balanced = Engine(base.spec(EPS, models={"actor": {"routerAuxLossCoef": 0.1}}, **kind), groups)
        out["experts"] = one_model(balanced, ref("qwen3_moe"))
    else:
        engine.load(base.load_command())
        out |= {"log": base.train(engine, range(1, 3)), "at_two": base.weights(engine)}
        out["parts_agree"] = base.parts_agree(engine)
        if tp == 1:
            out["halves"] = halves(engine)
    if cp > 1 and world == 2:
        out["refused"] = refused(groups)
    groups.close()
    return out


def one_model(engine: Engine, actor: ModelRef) -> dict[str, Any]:
    """Weights after two steps of such an actor."""
    engine.load(base.load_command(actor=actor))
    log = base.train(engine, range(1, 3))
    return {"log": log, "at_two": base.weights(engine)}


def halves(engine: Engine, actor: ModelRef | None = None) -> dict[str, Any]:
    """Weights after two steps with backwards in two halves."""
    engine.load(base.load_command(actor=actor))
    for step in (1, 2):
        work = {n: base.micro_batches(m.head, step, m.dp_rank, m.dp_size) for n, m in engine.models.items()}
        actions = [
            Action(model=name, micro_batch=i, kind=kind)
            for name in work
            for some in (("F",), ("I", "W"))
            for i in range(len(work[name]))
            for kind in some
        ]
        engine.run(actions, work)
        for name in engine.models:
            engine.optimizer_step(name)
    return {name: named for name, named in base.weights(engine).items() if name != "ema"}


def refused(groups: Any) -> dict[str, str]:
    out = {}
    rows = next(kind for kind, family in MODEL_FAMILIES.items() if not family.packs)
    cases = {
        "heads": ref("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48),
        "rows": ModelRef(head="lm", seed=1, scratch=small_scratch(rows)),
    }
    for name, actor in cases.items():
        try:
            Engine(base.spec(), groups).load(base.load_command(actor=actor))
        except RankFailed as failed:
            out[name] = str(failed)
    return out


def families(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """Small models of a few families; `every_family` of all that pack."""
    return {kind: unlike(ref(kind), rank, world, next(ports) if not i else None) for i, kind in enumerate(FAMILIES)}


def every_family(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    out = {}
    port: int | None = next(ports)
    for kind, family in MODEL_FAMILIES.items():
        if family.packs:
            out[kind] = unlike(ModelRef(head="lm", scratch=small_scratch(kind), seed=3), rank, world, port)
            port = None
    return out


def small_scratch(kind: str) -> ScratchModel:
    family = MODEL_FAMILIES[kind]
    config = small_copy(usual_config(kind), family).to_diff_dict()
    return ScratchModel(architecture=family.model_type, config={k: v for k, v in config.items() if k != "model_type"})


def unlike(of: ModelRef, rank: int, world: int, port: int | None) -> dict[int, float]:
    """By how much, of the largest number, logits and gradients differ on 2 and on all ranks. The keys are these."""
    if port is not None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    groups = {2: pairs[rank // 2], world: dist.group.WORLD}
    alone = build_stage(of)
    out = {}
    for size, group in groups.items():
        ranks, found = TokenRanks(group), []
        shared = build_stage(of)
        shared.share_tokens(ranks)
        for lengths in ROWS:
            tokens = torch.randint(3, 60, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))
            own, results = ranks.own(sum(lengths)), []
            for stage in (alone, shared):
                for name, parameter in stage.named_parameters():
                    parameter.grad = None
                    parameter.requires_grad_(name not in stage.constants)
                logits = stage(tokens if stage is alone else tokens[:, own], lengths)
                logits.log_softmax(-1)[..., 7].sum().backward()
                gradients = [p.grad for p in stage.parameters() if p.grad is not None]
                if stage is shared:
                    for gradient in gradients:
                        dist.all_reduce(gradient, group=group)
                results.append((logits.detach(), torch.cat([g.flatten() for g in gradients])))
            (a, of_a), (b, of_b) = results
            for wanted, got in ((a[:, own], b), (of_a, of_b)):
                assert wanted.shape == got.shape
                scale = float((a if wanted.dim() == 3 else of_a).abs().max())
                found.append(float((wanted - got).abs().max()) / scale if got.numel() else 0.0)
        out[size] = max(found)
    return out


base.SCENARIOS = {f.__name__: f for f in (training, families, every_family)}

if __name__ == "__main__":
    base.main()
