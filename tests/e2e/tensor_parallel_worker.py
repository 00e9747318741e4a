"""Trainer ranks with tensor parallelism, for test_tensor_parallel.py; as `engine_worker.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import engine_worker as base
import torch

from dovetail.manifest.types import ScratchModel
from dovetail.models import PipelineStage, load_config
from dovetail.models import model_stage as models_stage
from dovetail.models.build import build_stage, fill, open_source
from dovetail.models.layers.predictions import Predictions, by_chunks
from dovetail.models.tensor_parallel import split_stage
from dovetail.protocol.messages import Action, ModelRef
from dovetail.trainer.communication import groups as trainer_groups
from dovetail.trainer.communication.groups import PeerLost, RankFailed
from dovetail.trainer.engine.engine import Engine

SIZES = {
    "vocab_size": base.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GLU = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
FAMILIES = {
    "llama": {**GLU, "attention_bias": True, "mlp_bias": True},
    "qwen2": GLU,
    "qwen3": {**GLU, "head_dim": 12},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    # A scaled embedding, bounded scores and a window; norms of heads whose weights are added to 1.
    "gemma2": {**GLU, "head_dim": 8, "sliding_window": 5},
    "gemma3_text": {**GLU, "head_dim": 8, "sliding_window": 5},
}
# With Adam's default, gradients near zero move weights by the learning rate times a share that is their rounding, which
# the processor decides.
EPS = 1e-5
TRAINED = ("qwen3", "opt")  # gradients of each rank's heads, biases
ADAPTED = ("llama", "opt")
# (pp, dp, tp), and whether stages are sharded over dp.
LAYOUTS = {1: [(1, 1, 1, True)], 2: [(1, 1, 2, True)], 4: [(2, 1, 2, True), (1, 2, 2, True), (1, 2, 2, False)]}
REFUSED = {"num_key_value_heads": {"num_key_value_heads": 1}, "intermediate_size": {"intermediate_size": 47}}


def scratch(family: str, **changes: Any) -> ModelRef:
    return ModelRef(head="lm", scratch=ScratchModel(architecture=family, config=FAMILIES[family] | changes), seed=3)


def training(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """The engine under each layout; on two ranks also models of all families, passes alone, and what is refused."""
    out: dict[str, Any] = {}
    if rank == 0:
        next(trainer_groups._FORMED)  # as in ranks that have formed groups before others were started again
    for pp, dp, tp, sharded in LAYOUTS[world]:
        key = f"{pp}x{dp}x{tp}{'' if sharded else ' whole'}"
        groups = base.form(rank, world, next(ports), pp, dp, tp=tp)
        engine = Engine(base.spec(EPS, **({} if sharded else base.WHOLE)), groups)
        out[key] = base.full_training(engine, folder, key) if world < 4 else short_training(engine, folder, key)
        out[key]["peak_bytes"] = engine.measured.peak_bytes
        if world < 4:
            out |= {family: one_family(engine, family) for family in TRAINED}
        for family in ADAPTED if world < 4 else ADAPTED[:sharded]:
            out[f"{key} {family} lora"] = base.lora_training(groups, folder, f"{key}-{family}", scratch(family))
        if world == 2:
            out["passes"] = {family: passes(groups, family) for family in FAMILIES}
            out["bfloat16"] = base.mixed_training(groups, folder / "bfloat16")
            out["refused"] = refused(groups)
            out["resumed"] = resumed(engine, folder / "checkpoint-1x1x1")
            out["lost"] = lost(engine, groups)
        groups.close()
    return out


def short_training(engine: Engine, folder: Path, key: str) -> dict[str, Any]:
    """Less of what `base.full_training` does."""
    engine.load(base.load_command())
    log = base.train(engine, range(1, 3))
    engine.save(folder / f"checkpoint-{key}")
    engine.export("actor", folder / f"actor-{key}")
    out = {"log": log, "at_two": base.weights(engine), "parts_agree": base.parts_agree(engine)}
    if engine.models["actor"].groups.pp_size > 1:
        out["log"] = log + base.train(engine, range(3, 5), interleaved=True)
        out["end"] = base.weights(engine)
        out["halves"] = halves(engine)
    elif not engine.models["actor"].replicated:
        out["uneven"] = uneven(engine, folder / f"uneven-{key}")
    return out


def uneven(engine: Engine, path: Path) -> tuple[bool, bool]:
    """Whether weights that neither tp nor dp divides are read right, gathered, sent, and are back from a checkpoint."""
    ref = scratch("llama", vocab_size=base.VOCAB + 3, intermediate_size=54)
    engine.load(base.load_command(actor=ref))
    expected = dict(build_stage(ref).named_parameters())
    read = all(torch.equal(value, expected[name]) for name, value in engine.weights("actor")) and base.parts_agree(
        engine
    )
    base.train(engine, range(1, 2))
    before = base.weights(engine)
    engine.save(path)
    engine.load(base.load_command(str(path), actor=ref))
    after = base.weights(engine)
    return read, all(base.same(before[model], after[model]) for model in before)


def halves(engine: Engine) -> dict[str, Any]:
    """Weights after two steps with backwards in two halves."""
    engine.load(base.load_command())
    for step in (1, 2):
        work = {n: base.micro_batches(m.head, step, m.dp_rank, m.dp_size) for n, m in engine.models.items()}
        kinds = (("F",), ("I", "W"))
        actions = [
            Action(model=name, micro_batch=i, kind=kind)
            for name in work
            for some in kinds
            for i in range(len(work[name]))
            for kind in some
        ]
        engine.run(actions, work)
        for name in engine.models:
            engine.optimizer_step(name)
    return base.weights(engine)


def after(rank: int, world: int, ports: Iterator[int], folder: Path) -> dict[str, Any]:
    """One rank goes on from the checkpoints of several."""
    groups = base.form(rank, world, next(ports), 1, 1)
    return {
        key: resumed(Engine(base.spec(EPS), groups), folder / f"checkpoint-{key}")
        for key in ("1x1x2", "2x1x2", "1x2x2")
        if (folder / f"checkpoint-{key}").exists()
    }


def resumed(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    engine.load(base.load_command(str(checkpoint)))
    at_two = base.weights(engine)
    base.train(engine, range(3, 5))
    return {"at_two": at_two, "end": base.weights(engine)}


def one_family(engine: Engine, family: str) -> dict[str, Any]:
    engine.load(base.load_command(actor=scratch(family)))
    log = base.train(engine, range(1, 3))
    return {"log": log, "end": base.weights(engine), "parts_agree": base.parts_agree(engine)}


def passes(groups: Any, family: str) -> tuple[float, float]:
    """Largest differences of logits and of parameters' gradients from the whole model's on one rank."""
    ref = scratch(family)
    whole = build_stage(ref).requires_grad_(True)
    stage = PipelineStage(load_config(ref), "lm")
    mesh = groups.of("actor").tp_mesh
    split = split_stage(stage, mesh)
    stage.to_empty(device="cpu")
    fill(stage, open_source(ref, stage), {name: name for name, _ in stage.named_parameters()})
    stage.place_buffers("cpu")
    tokens = torch.randint(0, base.VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    nothing = stage(tokens, (9, 11), torch.zeros(0, dtype=torch.int64))
    assert nothing.shape == (0, base.VOCAB)
    nothing.sum().backward()
    outputs = [model(tokens, (9, 11)) for model in (whole, stage)]
    for output in outputs:
        output.logsumexp(-1).square().mean().backward()
    worst = unlike_gradients(whole, stage, split.partial, mesh)
    # As on a GPU: no rank has all of the vocabulary's logits.
    asked = Predictions(tokens[0].roll(-1), 0.7, "gradient")
    said = []
    for model, predict in ((whole, models_stage.predict), (stage, partial(by_chunks, chunk=900))):
        model.zero_grad()
        with patch.object(models_stage, "predict", predict):
            said.append(model(tokens, (9, 11), torch.arange(20), predictions=asked))
        (said[-1].logprobs.square() + 0.1 * said[-1].entropy).sum().backward()
    worst = max(worst, unlike_gradients(whole, stage, split.partial, mesh) / 20)
    differences = [outputs[0] - outputs[1], said[0].logprobs - said[1].logprobs, said[0].entropy - said[1].entropy]
    return max(float(each.detach().abs().max()) for each in differences), worst


def unlike_gradients(whole: PipelineStage, stage: PipelineStage, summed: frozenset[str], mesh: Any) -> float:
    """Largest difference of parameters' gradients. `summed`: those to be added up over the ranks of `mesh`."""
    worst = 0.0
    for (name, a), b in zip(whole.named_parameters(), stage.parameters(), strict=True):
        found: Any = b.grad
        if name in summed:
            torch.distributed.all_reduce(found, group=mesh.get_group())
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        worst = max(worst, float((found - a.grad).abs().max()))
    return worst


def refused(groups: Any) -> dict[str, str]:
    out = {}
    specs = {name: (base.spec(), scratch("llama", **change)) for name, change in REFUSED.items()}
    specs["lora"] = (base.spec(models={"actor": {"lora": {"rank": 2, "dropout": 0.1}}}), scratch("llama"))
    for name, (spec, actor) in specs.items():
        try:
            Engine(spec, groups).load(base.load_command(actor=actor))
        except RankFailed as failed:
            out[name] = str(failed)
    return out


def lost(engine: Engine, groups: Any) -> str:
    """What the first rank says when the other drops out in the middle of a pass."""
    engine.load(base.load_command())
    if groups.rank:
        layer = engine.models["critic"].module.body.layers["1"]
        layer.register_forward_pre_hook(lambda *_: groups.close())
        with suppress(Exception):
            base.train(engine, range(1, 3))
        return ""
    try:
        base.train(engine, range(1, 3))
    except PeerLost as found:
        return str(found)
    return "trained"


base.SCENARIOS = {f.__name__: f for f in (training, after)}

if __name__ == "__main__":
    base.main()
