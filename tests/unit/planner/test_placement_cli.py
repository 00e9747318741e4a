"""`dovetail plan`: what it explains, writes and refuses."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dovetail.cli.common import plan_inputs
from dovetail.cli.main import cli
from dovetail.protocol.errors import RunError
from dovetail.protocol.plan import Plan
from helpers.finished_runs import page_data

EXAMPLES = Path(__file__).parents[3] / "examples"
CLUSTER = EXAMPLES / "quickstart-cluster.yaml"
UNLIKE = EXAMPLES / "inventories" / "a100-v100-a10.yaml"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def call(*args):
    return CliRunner().invoke(cli, ["plan", *map(str, args)])


def test_a_job_on_unlike_gpus_is_explained_and_written(tmp_path):
    page, document = tmp_path / "plan.html", tmp_path / "plan.json"
    result = call(CLUSTER, "--html", page, "-o", document)
    assert result.exit_code == 0, result.output
    for words in ("actor training", "Memory of a GPU, GiB", "Decided against", "samples/s", "data sheets", "v100"):
        assert words in result.output
    plan = Plan.model_validate_json(document.read_text())
    assert plan.prediction is not None
    shown = page_data(page.read_text())["answers"]["plan"]
    assert {"a100 0", "a100 1", "v100 0", "a10 0"} <= {lane["label"] for lane in shown["lanes"]}
    assert [table["title"] for table in shown["tables"]] == ["Tasks", "Memory of a GPU, GiB", "Decided against"]
    assert dict(shown["phases"]) == plan.prediction.phases
    assert "on a single machine" not in result.output, "it is planned for a cluster"


@pytest.mark.slow
def test_an_inventory_gets_the_best_groups_beside_the_manifests_own(tmp_path):
    page = tmp_path / "plan.html"
    result = call(CLUSTER, "--inventory", UNLIKE, "--html", page)
    assert result.exit_code == 0, result.output
    assert "Best on this inventory" in result.output
    assert "Price of 1,000 samples: " in result.output
    assert "The manifest's own groups take" in result.output
    groups = yaml.safe_load(result.output[result.output.index("\nspec:\n") :])["spec"]["groups"]
    assert {role for group in groups for role in group["roles"]} == {"trainer", "rollout"}
    assert "quickstart" in page.read_text()


@pytest.mark.slow
def test_a_job_without_gpus_is_planned_and_told_why_nothing_is_predicted(tmp_path):
    result = call(EXAMPLES / "quickstart.yaml")
    assert result.exit_code == 0
    assert "trainer rank 1 of 2" in result.output
    assert "Nothing is predicted: its groups run on CPUs" in result.output
    refused = call(EXAMPLES / "quickstart.yaml", "--html", tmp_path / "plan.html")
    assert refused.exit_code == 2
    assert "nothing is predicted for this job; give --inventory" in refused.output
    helped = call(EXAMPLES / "quickstart.yaml", "--inventory", UNLIKE, "--json")
    assert helped.exit_code == 0
    assert json.loads(helped.stdout)["worldSize"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pools: [", "is neither YAML nor JSON, line"),
        ("nodes: 3", "holds no list `pools`"),
        ("pools: [{product: A1000}]", "GPU product A1000 is unknown"),
        ("pools: [{product: Tesla-T4, nodes: many}]", "nodes of the inventory is 'many'"),
    ],
)
def test_a_bad_inventory_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "gpus.yaml"
    path.write_text(text)
    result = call(CLUSTER, "--inventory", path)
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.count("Error:") == 1


def test_missing_files_and_contradicting_options_are_named(tmp_path):
    assert "gone.yaml cannot be read" in call(CLUSTER, "--inventory", tmp_path / "gone.yaml").output
    assert "gone.toml cannot be read" in call(CLUSTER, "--hardware", tmp_path / "gone.toml").output
    assert "give one of them" in call(CLUSTER, "--inventory", UNLIKE, "--cluster").output


def test_the_same_sentence_refuses_a_product_in_plan_and_validate():
    wrong = ["--set", "spec.groups[1].gpu.product=V100", str(CLUSTER)]
    plan, validate = (CliRunner().invoke(cli, [command, *wrong]) for command in ("plan", "validate"))
    assert plan.exit_code == validate.exit_code == 2
    sentence = "spec.groups[1].gpu.product: GPU product V100 is unknown; did you mean Tesla-V100"
    assert sentence in plan.output
    assert sentence in validate.output


def test_measured_figures_go_before_the_data_sheets(tmp_path):
    names = {"NVIDIA-A100-SXM4-80GB", "Tesla-V100-SXM2-32GB", "NVIDIA-A10"}
    table = (
        'source = "here"\ntflops = {float32 = 10, float16 = 100, bfloat16 = 100}\nmemory_gib = 30\nmemory_gbps = 700\n'
        "nvlink_gbps = 0\npcie_gbps = 10\ncapability = [8, 0]\n"
    )
    path = tmp_path / "hardware.toml"
    path.write_text("".join(f"[{name}]\n{table}" for name in sorted(names)))
    result = call(CLUSTER, "--hardware", path, "--json")
    assert result.exit_code == 0, result.output
    prediction = json.loads(result.stdout)["prediction"]
    assert prediction["hardware"] == "measured"
    assert {memory["capacity"] for memory in prediction["memory"]} == {30 * 2**30}


@pytest.mark.slow
def test_nodes_come_from_kubectl(monkeypatch):
    node = {
        "metadata": {"labels": {"nvidia.com/gpu.product": "NVIDIA-A10"}},
        "status": {"allocatable": {"nvidia.com/gpu": "4"}},
    }
    monkeypatch.setattr(plan_inputs, "_nodes", lambda: json.dumps({"items": [node]}))
    result = call(CLUSTER, "--cluster")
    assert result.exit_code == 0, result.output
    assert "NVIDIA-A10" in result.output


def test_kubectl_that_fails_is_quoted(monkeypatch, tmp_path):
    fake = tmp_path / "kubectl"
    fake.write_text("#!/bin/sh\necho 'The connection was refused' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="The connection was refused"):
        plan_inputs.inventory(None, True, {})
