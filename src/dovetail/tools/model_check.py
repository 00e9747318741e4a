"""Proves on a small copy of a model that Dovetail computes it rightly: `dovetail model check`. It needs config.json and
no weights.

The copy has the pattern of the model's layers and the settings of its configuration, with few and narrow layers and
random weights. transformers' own model with its own eager attention says what is right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.coordinator.data.downloads.proof import DEADLINE
from dovetail.manifest.checks.model_contents import model_config
from dovetail.manifest.model_families import MODEL_TYPES, ModelFamily
from dovetail.manifest.model_families.family import layers_at
from dovetail.manifest.model_shape import ModelShape
from dovetail.models import HuggingFaceWriter, ModelError, PipelineStage, build_stage, load_config
from dovetail.models.config import family_facts
from dovetail.models.derive import derive_family, differences, known, resized
from dovetail.models.layers.token_ranks import TokenRanks
from dovetail.models.source import in_files
from dovetail.protocol.errors import last_line
from dovetail.protocol.messages import ModelRef
from dovetail.tools.doctor.finding import Finding, report

# Sizes of the copy. Windows are shorter than its sequences.
_SMALL = {
    "intermediate_size": 96,
    "ffn_dim": 96,
    "moe_intermediate_size": 48,
    "shared_intermediate_size": 56,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), 4),
    "shared_expert_intermediate_size": 40,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "attention_chunk_size": 6,
    "index_topk": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LENGTHS = (9, 13)
_TOLERANCE = 2e-5  # of the largest number, in float32
_MOST_LAYERS = 16
# What two ranks share: "tp" the layers, "cp" the tokens.
Degree = Literal["tp", "cp"]
_PATIENCE = timedelta(seconds=DEADLINE)
_FIELDS = {"tied": "tie_word_embeddings"}  # facts that are the defaults of these fields
_MEND = f"use a model of another type: {', '.join(MODEL_TYPES)}"


def prove_model(ref: ModelRef, scratch: Path) -> list[Finding]:
    """Proves the model that `ref` names. `scratch`: an empty folder to write to."""
    try:
        config = load_config(ref)
        stated = ref.scratch.config if ref.scratch else model_config(Path(str(ref.path)))
    except ModelError as error:
        return [Finding("configuration", "problem", str(error))]
    return prove(config, scratch, stated=stated)


def prove(
    config: Any,
    scratch: Path,
    family: ModelFamily | None = None,
    ranks: bool = True,
    stated: Container[str] = (),
) -> list[Finding]:
    """Proves a model of `config`, transformers' configuration, in the empty folder `scratch`. One finding for each
    check, in order. A problem refuses the model. `family`: its facts, if they are not those of the table. `ranks`: also
    start two processes that share layers and tokens. `stated`: the fields that config.json has, whose defaults do not
    matter."""
    found = family or family_facts(config)
    try:
        changed = _changed(found, derive_family(found.name, found.forward), stated)
        if changed:
            says = f"the installed transformers gives {found.name} models other parts ({', '.join(sorted(changed))})"
            return [Finding("parts", "problem", says, "install the transformers that Dovetail's requirements name")]
        with known(found):
            return list(_Copy(config, found, scratch).findings(ranks))
    except Exception as error:  # configurations of users make transformers raise many kinds of errors
        says = str(error) if isinstance(error, ModelError) else unbuilt(error)
        return [Finding("parts", "problem", says, _MEND)]


def unbuilt(error: Exception) -> str:
    """Says that a model cannot be built of stages, and why."""
    last = last_line(error)
    if " " not in last:
        last = f"{type(error).__name__} {last}"
    return f"stages cannot be built of it: {last if len(last) < 120 else last[:117].rpartition(' ')[0] + ' ...'}"


def _changed(table: ModelFamily, derived: ModelFamily, stated: Container[str]) -> set[str]:
    """The facts that the table does not have as they are derived. A default matters only if it is used."""
    found = dict(differences(table, derived))
    for name in ("kept", "kept_dense", "kept_linear", "packs", "linears", "kinds"):  # measured or proved
        found.pop(name, None)
    old, new = found.pop("defaults", ({}, {}))
    names = {name for name in {**old, **new} if old.get(name) != new.get(name)}
    names |= {_FIELDS.get(name, name) for name in found}
    return {name for name in names if name not in stated}


def small_copy(config: Any, family: ModelFamily) -> Any:
    """The configuration of the small copy. All kinds of layers are in it."""
    dense, count = family.dense_layers(config.to_dict()), config.num_hidden_layers
    attention = getattr(config, "layer_types", None) or ["full_attention"] * count
    known = config.to_dict()
    beside = layers_at({n: getattr(config, n, None) for n in (*family.pattern, "num_hidden_layers")}, family.pattern)
    beside = beside or ([""] * count if len(family.kinds) < 2 else [str(number) for number in range(count)])
    kinds = [(kind, number in dense, beside[number]) for number, kind in enumerate(attention)]
    most = min(count, _MOST_LAYERS)
    layers = next((n for n in range(min(4, most), most) if set(kinds[:n]) == set(kinds)), most)
    heads = known.get("num_attention_heads") or 1
    keys = known.get("num_key_value_heads") or heads
    size = known.get("head_dim") or config.hidden_size // heads
    alone = keys == heads or family.latent
    sizes = {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 4 if alone else min(2, keys)}
    # Some types need heads that fill the hidden states exactly.
    sizes |= {"head_dim": 16, "hidden_size": 64 if size * heads == config.hidden_size else 48}
    if getattr(config, "sliding_window", None) is None:
        del sizes["sliding_window"]
    if (getattr(config, "n_group", None) or 1) > 1:
        sizes |= {"n_group": 2, "topk_group": 1}
    return resized(config, layers, **sizes)


class _Copy:
    """A small copy of a model, and the checks that it must pass."""

    def __init__(self, config: Any, family: ModelFamily, scratch: Path) -> None:
        import transformers

        self.family, self.folder, self.export = family, scratch / "copy", scratch / "export"
        self.config, self.whole = small_copy(config, family), config
        torch.manual_seed(0)
        try:
            model = transformers.AutoModelForCausalLM.from_config(
                self.config, dtype=torch.float32, attn_implementation="eager"
            )
        except Exception as error:  # configurations of users make the classes raise many kinds of errors
            raise ModelError(f"transformers cannot build the model: {last_line(error)}") from error
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        self.model: Any = model.eval()
        model.save_pretrained(self.folder)
        self.tokens = _tokens()
        self.parts = self.tokens.split(_LENGTHS, 1)

    def stages(self, size: int, head: Any = "lm", folder: Path | None = None) -> list[PipelineStage]:
        return [build_stage(ModelRef(head=head, path=str(folder or self.folder)), r, size) for r in range(size)]

    def findings(self, ranks: bool) -> Iterator[Finding]:
        """Yields the findings. It ends with the first problem."""
        checks: list[tuple[str, str, Callable[[], str]]] = [
            ("attention", "Dovetail's attention does not compute what the model's own does", self.attention),
            ("stages", "pipeline stages do not compute what the whole model computes", self.cuts),
            ("packing", "packed sequences change each other, so a layer does not know where they begin", self.packing),
            ("gradients", "gradients of the stages are not those of the whole model", self.gradients),
            ("value head", "the model with a value head does not compute", self.values),
            ("export", "an exported model is not the same when transformers loads it", self.exported),
            ("memory", "the planner counts other parameters than the model has", self.counted),
        ]
        if self.family.softmax_routers:
            checks.append(("routing replay", "experts that a rollout chose get other weights", self.replayed))
        for name, wrong, check in checks:
            try:
                yield Finding(name, "ok", check())
            except _Differs as error:
                yield Finding(name, "problem", f"{wrong} ({error})", _MEND)
                return
            except Exception as error:  # of layers that need what stages do not give them
                yield Finding(name, "problem", f"{wrong} ({type(error).__name__}: {last_line(error)})", _MEND)
                return
        if ranks:
            yield from self.shared()
        yield served(self.family)

    def attention(self) -> str:
        with torch.no_grad():
            wanted = self.model(self.tokens, use_cache=False).logits
            if not bool(wanted.isfinite().all()):
                raise _Differs("its outputs are not finite")
            return _equal(self.stages(1)[0](self.tokens), wanted, "logits equal those of transformers")

    def cuts(self) -> str:
        count = self.config.num_hidden_layers
        with torch.no_grad():
            wanted = self.stages(1)[0](self.tokens)
            for size in range(2, count + 1):
                if not torch.equal(_pass(self.stages(size), self.tokens), wanted):
                    raise _Differs(f"{size} stages")
        return f"1 to {count} stages give the same bits"

    def packing(self) -> str:
        with torch.no_grad():
            whole = self.stages(1)[0]
            alone = torch.cat([whole(part) for part in self.parts], 1)
            way = "packed sequences" if self.family.packs else "sequences as rows"
            return _equal(whole(self.tokens, _LENGTHS), alone, f"{way} equal single ones")

    def replayed(self) -> str:
        assert self.family.experts is not None
        stage = self.stages(1)[0]
        chosen: list[Tensor] = []
        for layer in stage.layers.values():
            router = layer.get_submodule(self.family.experts.router)
            router.register_forward_hook(lambda _module, _inputs, found: chosen.append(found[2]))
        lengths = (self.tokens.shape[1],)
        with torch.no_grad():
            plain = stage(self.tokens, lengths)
            again = stage(self.tokens, lengths, routing=torch.stack(chosen, 1))
        return _equal(again, plain, "the experts of a rollout can be used again")

    def gradients(self) -> str:
        for part in self.parts:
            _loss(self.model(part, use_cache=False).logits).backward()
        wanted = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        stages = [_trained(stage).train() for stage in self.stages(2)]
        _loss(_pass(stages, self.tokens, _LENGTHS)).backward()
        found: dict[str, Tensor] = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if parameter.grad is not None:
                    key = stage.checkpoint_name(name)
                    found[key] = found.get(key, torch.zeros(())) + parameter.grad
        return _all_equal(found, wanted, "gradients equal those of transformers")

    def values(self) -> str:
        import transformers

        stage = self.stages(1, "value")[0]
        with torch.no_grad():
            stage.score.weight.copy_(torch.linspace(-1, 1, stage.score.weight.numel())[None])
            values = stage(self.tokens)
            folder = self._write(stage, "value")
            _equal(self.stages(1, "value", folder)[0](self.tokens), values, "")
            if not hasattr(transformers, self.family.classifier):
                return "values are the same after export; transformers has no class of its own for them"
            found = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
            return _equal(found(self.tokens).logits[:, 0], values[:, -1], "values equal those of transformers")

    def exported(self) -> str:
        import transformers

        stage = self.stages(1)[0]
        folder = self._write(stage, "lm")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager"
        )
        for kind in ("missing_keys", "unexpected_keys"):
            if report[kind]:
                raise _Differs(f"{kind.replace('_', ' ')}: {sorted(report[kind])[0]}")
        with torch.no_grad():
            return _equal(model(self.tokens, use_cache=False).logits, stage(self.tokens), "transformers loads it again")

    def counted(self) -> str:
        counted = ModelShape.of(self.config.to_dict()).parameters()
        actual = sum(p.numel() for p in self.model.parameters())
        if abs(counted - actual) > (0.05 if self.family.kinds else 0.01) * actual:
            raise _Differs(f"{counted:,} and {actual:,}")
        return "the planner counts its parameters"

    def shared(self) -> Iterator[Finding]:
        """Whether two ranks that share the layers, or the tokens, compute what one computes. A model that they cannot
        share still trains with tp 1 and cp 1."""
        shape = ModelShape.of(self.whole.to_dict())
        fit = [str(cp) for cp in range(2, shape.heads + 1) if shape.share_problem(cp) is None]
        yield self._of_two("tp", "tensor parallelism", shape.split_problem(2))
        found = self._of_two("cp", "context parallelism", None if fit else shape.share_problem(2))
        if found.state == "ok":
            found = replace(found, says=f"{found.says}; cp {', '.join(fit)} fit its heads")
        yield found

    def _of_two(self, degree: Degree, name: str, refused: str | None) -> Finding:
        if refused is not None:
            return Finding(name, "skipped", f"not proved: {degree} is 2, {refused}")
        try:
            why = share({self.folder: self.family}, degree)[self.folder]
        except Exception as error:  # of the machine: what ranks find in a model is their answer
            return Finding(name, "skipped", f"two ranks cannot run here: {last_line(error)}")
        if why is None:
            return Finding(name, "ok", "2 ranks give the logits and gradients of 1")
        return Finding(name, "warning", f"two ranks do not compute what one computes ({why})", f"keep {degree} 1")

    def _write(self, stage: PipelineStage, head: Any) -> Path:
        folder: Path = self.export / head
        folder.mkdir(parents=True, exist_ok=True)
        writer = HuggingFaceWriter(folder)
        held = in_files(stage.family, stage.named_parameters())
        writer.finish([writer.write(held, torch.float32)], stage.config, head, torch.float32, None)
        return folder


def served(family: ModelFamily) -> Finding:
    """How vLLM serves the model, if vLLM is installed."""
    if find_spec("vllm") is None:
        return Finding("vLLM", "skipped", "vLLM is not installed here")
    try:
        from vllm.model_executor.models.registry import ModelRegistry
    except Exception as error:  # of libraries that this machine lacks
        return Finding("vLLM", "skipped", f"vLLM cannot be imported here: {last_line(error)}")
    registered = ModelRegistry.models.get(family.causal_lm)
    if registered is None and not _wrapped(family):
        return Finding("vLLM", "warning", f"vLLM does not serve {family.causal_lm}")
    # What it does not know by name it wraps.
    own = registered is not None and ".transformers" not in str(getattr(registered, "module_name", ""))
    by = "with a class of its own" if own else "through its Transformers backend"
    return Finding("vLLM", "ok", f"vLLM serves it {by}")


def _wrapped(family: ModelFamily) -> bool:
    """Whether vLLM's Transformers backend takes the class: its attention must be one that vLLM can replace."""
    import transformers

    found = getattr(transformers, family.causal_lm, None)
    return found is not None and bool(found.is_backend_compatible())


class _Differs(ValueError):
    """Two results differ. The message says by how much, or where."""


def _equal(found: Tensor, wanted: Tensor, says: str) -> str:
    found, wanted = found.detach(), wanted.detach()
    worst, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not worst <= _TOLERANCE * max(largest, 1.0):
        raise _Differs(f"off by {worst:.0e} of {largest:.0e}")
    return f"{says} (within {worst:.0e} of {largest:.1f})"


def _all_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], says: str) -> str:
    if lacks := sorted(set(wanted) - set(found)):
        raise _Differs(f"no gradient of {lacks[0]}")
    both = [torch.cat([each[name].flatten() for name in sorted(wanted)]) for each in (found, wanted)]
    return _equal(both[0], both[1], says)


def _loss(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[..., 7].sum()


def _tokens() -> Tensor:
    """The token ids that models are compared with, the same in each process, (1, sum of _LENGTHS)."""
    return torch.randint(3, 96, (1, sum(_LENGTHS)), generator=torch.Generator().manual_seed(1))


def _trained(stage: PipelineStage) -> PipelineStage:
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name not in stage.constants)
    return stage


def _pass(stages: Sequence[PipelineStage], tokens: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    hidden: Any = tokens
    for stage in stages:
        hidden = stage(hidden, lengths)
    return torch.as_tensor(hidden)


def share(copies: dict[Path, ModelFamily], degree: Degree) -> dict[Path, str | None]:
    """Whether two tensor-parallel ranks ("tp"), or two context-parallel ones ("cp"), compute what one computes, for
    small copies in these folders: by how much they differ, or None. It starts two processes, which a third one forks
    that has made their imports."""
    import multiprocessing.forkserver

    import torch.multiprocessing as processes

    answers = next(iter(copies)).parent / f"answers-{degree}"
    answers.mkdir(exist_ok=True)
    multiprocessing.set_forkserver_preload([__spec__.name])
    processes.start_processes(_rank, (copies, degree, answers), nprocs=2, start_method="forkserver")
    found = [torch.load(answers / str(rank)) for rank in range(2)]
    return {folder: found[0][str(folder)] or found[1][str(folder)] for folder in copies}


def _rank(rank: int, copies: dict[Path, ModelFamily], degree: Degree, answers: Path) -> None:
    """One of two ranks. It writes by how much each copy's logits or gradients differ from those of one rank. It raises
    what torch.distributed says of the other rank."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{answers}/meeting", rank=rank, world_size=2, timeout=_PATIENCE)
    shared = _with_shared_layers if degree == "tp" else _with_shared_tokens
    found: dict[str, str | None] = {}
    for folder, family in copies.items():
        found[str(folder)] = None
        with known(family):
            ref = ModelRef(head="lm", path=str(folder))
            alone = _trained(build_stage(ref))
            wanted = alone(_tokens(), _LENGTHS)
            _loss(wanted).backward()
            try:
                logits, gradients, own = shared(ref)
                _equal(logits, wanted[:, own], "")
                _all_equal(gradients, _gradients(alone), "")
            except Exception as error:  # both ranks raise what the model does, because they run the same code
                # gloo's own errors are often plain RuntimeErrors that name its file.
                if isinstance(error, dist.DistError) or "gloo" in str(error):
                    raise
                found[str(folder)] = last_line(error)
    torch.save(found, answers / str(rank))
    dist.destroy_process_group()


def _with_shared_layers(ref: ModelRef) -> tuple[Tensor, dict[str, Tensor], slice]:
    """The logits and gradients of two tensor-parallel ranks, and of which tokens they are."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from dovetail.models.build import fill, open_source
    from dovetail.models.tensor_parallel import split_stage

    stage = PipelineStage(load_config(ref), "lm")
    split = split_stage(stage, init_device_mesh("cpu", (2,)))
    stage.to_empty(device="cpu")
    fill(stage, open_source(ref, stage), {name: name for name, _ in stage.named_parameters()})
    stage.place_buffers("cpu")
    logits = stage(_tokens(), _LENGTHS)
    _loss(logits).backward()
    gradients = _gradients(stage)
    for name in sorted(split.partial & set(gradients)):
        dist.all_reduce(gradients[name])
    return logits, gradients, slice(None)


def _with_shared_tokens(ref: ModelRef) -> tuple[Tensor, dict[str, Tensor], slice]:
    """The logits and gradients of two context-parallel ranks, and of which tokens the logits are."""
    import torch.distributed as dist

    ranks, tokens = TokenRanks(dist.group.WORLD), _tokens()
    own = ranks.own(tokens.shape[1])
    stage = _trained(build_stage(ref))
    stage.share_tokens(ranks)
    logits = stage(tokens[:, own], _LENGTHS)
    _loss(logits).backward()
    gradients = _gradients(stage)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return logits, gradients, own


def _gradients(stage: PipelineStage) -> dict[str, Tensor]:
    return {name: _whole(p.grad) for name, p in stage.named_parameters() if p.grad is not None}


def _whole(gradient: Any) -> Tensor:
    """A gradient of which each rank may hold a part."""
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


def main(folder: str, trusted: str) -> None:
    """Prove the model of a folder. Prints what was found as one JSON line (`report`)."""
    with TemporaryDirectory(prefix="dovetail-") as scratch:
        ref = ModelRef(head="lm", path=folder, trust_remote_code=trusted == "1")
        print(json.dumps(report(prove_model(ref, Path(scratch)))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
