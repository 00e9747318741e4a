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
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dovetail.manifest.model_families import TABLE, ModelFamily
from dovetail.manifest.model_families.family import Experts
from dovetail.manifest.model_shape import ModelShape
from dovetail.models import ModelError
from dovetail.models.derive import derive_family, known, resized
from dovetail.protocol.messages import ModelRef
from dovetail.tools.model_check import prove, share, unbuilt
from dovetail.trainer.profile.pass_times import measure_model

# As near as the planner's memory of a layer must be to what is measured.
NEAR = 0.05
WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96}
INNER = ("intermediate_size", "ffn_dim", "moe_intermediate_size")
SIZES = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "word_embed_proj_dim": 64}
# Model types that pass, but that nobody can use.
NOT_WANTED = {"phi": "vLLM loses the bias of its head when new weights arrive"}


def measured(config: Any, family: ModelFamily) -> ModelFamily:
    """The family with what autograd keeps of one layer. Raises ModelError if no combination fits."""
    found = []
    for inner in (96, 320):
        sizes = {**WIDTHS, **SIZES, **dict.fromkeys(INNER, inner), "max_position_embeddings": 128, "pad_token_id": 0}
        small = resized(config, 3, **sizes)
        with TemporaryDirectory() as folder:
            fields = small.to_dict()
            Path(folder, "config.json").write_text(json.dumps({**fields, "model_type": family.name}))
            ref = ModelRef(head="lm", path=folder)
            times = measure_model(ref, [4], 32, torch.device("cpu"), torch.float32, repeats=1)
        found.append((fields, times.layer_times[0].activation_bytes / 128))

    def off(kept: int, partial: bool, side: bool) -> float:
        with known(replace(family, kept=kept, partial_rotary=partial, side_by_side=side)):
            return max(abs(ModelShape.of(fields).saved_bytes(4) / bytes_ - 1) for fields, bytes_ in found)

    # Ties go to the facts of Llama.
    choices = sorted(product(range(1, 10), (False, True), (False, True)), key=lambda c: (c[0] != 4, c[1:]))
    best = min(choices, key=lambda choice: round(off(*choice), 3))
    if off(*best) > NEAR:
        raise ModelError(f"the planner's memory of a layer is off by {off(*best):.0%}")
    return replace(family, kept=best[0], partial_rotary=best[1], side_by_side=best[2])


def row(family: ModelFamily) -> dict[str, Any]:
    """A family as the table holds it: what differs from the defaults."""
    plain = ModelFamily("", "", {}, ())
    found = {
        f.name: getattr(family, f.name) for f in fields(family) if getattr(family, f.name) != getattr(plain, f.name)
    }
    found["linears"] = [list(asdict(part).values()) for part in family.linears]
    if family.experts is not None:
        usual = asdict(Experts())
        found["experts"] = {name: value for name, value in asdict(family.experts).items() if value != usual[name]}
    return found


def judge(kind: str, scratch: Path) -> ModelFamily | str:
    """The facts about a type, or the reason why it is not taken. `scratch` gets its small copy."""
    if kind in NOT_WANTED:
        return NOT_WANTED[kind]
    try:
        config = CONFIG_MAPPING[kind]()
        family = derive_family(config)
        with known(family):
            family = measured(config, family)
        found = prove(config, scratch, family, ranks=False)
        return next((f.says for f in found if f.state in ("problem", "warning")), family)
    except ModelError as error:
        return str(error)
    except Exception as error:
        return unbuilt(error)


def judged(kinds: list[str]) -> Iterator[tuple[str, ModelFamily | str]]:
    """Each type with its facts or the reason. Two ranks compute all copies at the end, because they start slowly."""
    copies = {}
    with TemporaryDirectory() as scratch:
        for kind in kinds:
            place = Path(scratch, kind)
            with contextlib.redirect_stderr(io.StringIO()):
                found = judge(kind, place)
            print(f"{kind}: {found if isinstance(found, str) else 'proved'}", flush=True)
            if isinstance(found, ModelFamily) and found.splits:
                copies[place / "copy"] = found
            else:
                yield kind, found
        for folder, why in (share(copies) if copies else {}).items():
            family = copies[folder]
            if why is not None:
                print(f"{family.name}: two ranks: {why}", flush=True)
                unshared = tuple(replace(part, split=None) for part in family.linears)
                family = replace(family, linears=unshared)
            yield family.name, family


def main() -> int:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    kinds = sys.argv[1:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
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
    text = '{{\n"transformers": {},\n"families": [\n{}\n],\n"refused": {{\n{}\n}}\n}}\n'
    TABLE.write_text(text.format(json.dumps(transformers.__version__), ",\n".join(lines), why))
    return 0


if __name__ == "__main__":
    sys.exit(main())
