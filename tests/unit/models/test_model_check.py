"""`dovetail model check` and the table of families: it holds what is derived, and what is wrong is found."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.manifest.model_families import MODEL_FAMILIES, REFUSED
from dovetail.models.derive import derive_family, differences
from dovetail.tools.model_check import prove, small_copy
from helpers.family_models import COMMON, FAMILIES

pytestmark = pytest.mark.slow
# Factors of embedding and logits, norms of all heads together, windows and no rotary positions in some layers.
SOME = ("granite", "olmo2", "cohere2", "smollm3")


def config_of(kind: str, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **changes)


def problems(kind: str, folder: Path, **facts: Any) -> str:
    """What the check finds wrong in a family whose facts are changed."""
    found = prove(config_of(kind), folder, replace(MODEL_FAMILIES[kind], **facts), ranks=False)
    return "; ".join(finding.says for finding in found if finding.state == "problem")


@pytest.mark.parametrize("kind", sorted(MODEL_FAMILIES))
def test_the_table_holds_what_transformers_says(kind: str) -> None:
    assert set(differences(MODEL_FAMILIES[kind], derive_family(config_of(kind)))) <= {
        "kept",  # these three are measured
        "partial_rotary",
        "side_by_side",
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in SOME else pytest.mark.nightly) for k in sorted(MODEL_FAMILIES)]
)
def test_a_family_of_the_table_passes(kind: str, tmp_path: Path) -> None:
    """Nightly with two tensor-parallel ranks, which start slowly."""
    found = prove(config_of(kind), tmp_path, ranks=kind not in SOME)
    assert [f.says for f in found if f.state in ("problem", "warning")] == []
    checks = {f.check for f in found}
    assert checks >= {"attention", "stages", "packing", "gradients", "value head", "export", "memory", "vLLM"}


@pytest.mark.parametrize(
    ("kind", "facts", "finding"),
    [
        ("granite", {"logit_factor": None}, "installed transformers gives granite models other parts .logit_factor"),
        ("gemma2", {"exits": ()}, "other parts .exits"),
        ("llama", {"norms": 3}, "other parts .norms"),
    ],
)
def test_facts_that_transformers_does_not_bear_out_are_found(
    kind: str, facts: dict[str, Any], finding: str, tmp_path: Path
) -> None:
    assert re.search(finding, problems(kind, tmp_path, **facts))


@pytest.mark.parametrize(
    ("kind", "finding"),
    [
        ("nanochat", "attention does not compute"),  # a norm after the embedding
        ("stablelm", "packed sequences change each other"),  # its layers hand no packing on
    ],
)
def test_what_stages_compute_wrongly_is_refused(kind: str, finding: str, tmp_path: Path) -> None:
    config = config_of(kind)
    found = [f for f in prove(config, tmp_path, derive_family(config), ranks=False) if f.state == "problem"]
    assert finding in found[0].says
    assert kind in REFUSED


def test_the_copy_has_all_kinds_of_layers_of_the_model() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = config_of("gemma3_text", num_hidden_layers=12, layer_types=kinds * 2, sliding_window=512)
    small = small_copy(config)
    assert small.layer_types == kinds
    assert small.sliding_window < 9
    assert small_copy(config_of("llama", num_hidden_layers=2)).num_hidden_layers == 2
    grouped = small_copy(config_of("llama", num_attention_heads=32, num_key_value_heads=8))
    assert grouped.num_key_value_heads < grouped.num_attention_heads


def test_the_command_proves_a_folder_and_refuses_another(tmp_path: Path) -> None:
    config = config_of("llama", **COMMON, **FAMILIES["llama"])
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "good")
    done = CliRunner().invoke(cli, ["model", "check", str(tmp_path / "good"), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {f["check"]: f["state"] for f in told["findings"]}["tensor parallelism"] == "ok"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    done = CliRunner().invoke(cli, ["model", "check", str(tmp_path / "other")])
    assert done.exit_code == 1
    assert "qwen3_next" in done.stdout
    assert "different parts" in " ".join(done.stdout.split())
