"""The CRD, the JSON schema and the reference page."""

import importlib.util
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from dovetail.manifest.checks.rules import CEL_RULES
from dovetail.manifest.describe.crd import crd
from dovetail.manifest.types import RLHFJob

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "hack" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_generated_files_are_fresh(generate):
    assert generate.main(["--check"]) == 0


@pytest.mark.slow
def test_check_names_stale_files_and_writes_nothing(generate, tmp_path, capsys):
    assert generate.main(["--check"], root=tmp_path) == 1
    assert "docs/reference.md" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert generate.main([], root=tmp_path) == 0
    assert generate.main(["--check"], root=tmp_path) == 0


VERSION = crd()["spec"]["versions"][0]
ROOT_SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def nodes(schema=ROOT_SCHEMA, path=""):
    """Every schema node with its path, not those inside anyOf: these are value validations."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def test_crd_is_a_structural_schema():
    allowed = {
        *("type", "properties", "required", "items", "enum", "default", "description", "format", "pattern", "nullable"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems"),
        *("maxItems", "maxProperties", "anyOf", "x-kubernetes-validations", "x-kubernetes-list-type"),
        *("x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"),
    }
    for path, node in nodes():
        assert set(node) <= allowed, (path, set(node) - allowed)
        if "type" not in node and not node.get("x-kubernetes-int-or-string"):
            assert node.get("x-kubernetes-preserve-unknown-fields"), f"{path} has no type"
        if "exclusiveMinimum" in node:
            assert node["exclusiveMinimum"] is True, "OpenAPI 3.0 has booleans here"
        for branch in node.get("anyOf", []):
            assert not {"type", "default", "description", "nullable"} & set(branch), path
    assert "$ref" not in json.dumps(ROOT_SCHEMA)


def test_everything_that_rules_may_walk_is_bounded():
    for path, node in nodes():
        if path in ("", ".apiVersion", ".kind", ".metadata"):
            continue
        kind = node.get("type")
        if kind == "array":
            assert "maxItems" in node, path
        if kind == "string" and "enum" not in node and "format" not in node:
            assert "maxLength" in node, path
        if kind == "object" and "properties" not in node:
            assert "maxProperties" in node, path


def test_required_fields_have_no_default_and_defaults_fill_the_rest():
    for path, node in nodes():
        for name in node.get("required", []):
            assert "default" not in node["properties"][name], f"{path}.{name}"
    spec = ROOT_SCHEMA["properties"]["spec"]["properties"]
    assert spec["stages"]["default"] == ["sft", "reward", "ppo"]
    assert spec["ppo"]["default"] == {}
    assert spec["ppo"]["properties"]["kl"]["properties"]["coef"]["default"] == 0.05
    assert spec["ppo"]["properties"]["valueClip"]["nullable"] is True, "null turns clipping off"
    assert "nullable" not in spec["ppo"]["properties"]["ema"], "null is the default, and is pruned"


def test_the_api_server_writes_no_defaults_into_lists():
    """Argo CD and kubectl compare lists as a whole, and would see a difference for ever."""
    files = sorted((ROOT / "helm/dovetail/files/crds").glob("*.yaml"))
    assert len(files) == 2
    versions = [version for file in files for version in yaml.safe_load(file.read_text())["spec"]["versions"]]
    trees = [node for version in versions for node in nodes(version["schema"]["openAPIV3Schema"])]
    assert [path for path, node in trees if "[]" in path and "default" in node] == []
    assert any("[]" in path for path, _ in trees)


def test_rules_read_fields_that_exist_and_that_defaults_fill_or_has_guards():
    """The API server also tries a rule on its object's own default, in which nothing is filled in yet."""
    by_path = dict(nodes())
    for rule in CEL_RULES:
        assert rule.message
        top = by_path["." + rule.path]
        for has, reference in re.findall(r"(has\()?\bself((?:\.[A-Za-z_]\w*)+)", rule.rule):
            node, read = top, "self"
            steps = reference.strip(".").split(".")
            for step in steps[: -1 if has else None]:
                if step in ("all", "contains", "exists", "exists_one", "filter", "matches", "size", "split"):
                    break
                parent, node = node, node["properties"][step.strip("_")]
                read += f".{step}"
                filled = "default" in node or step in parent.get("required", [])
                if parent is top and "default" in top:
                    filled = False
                assert filled or f"has({read})" in rule.rule, (
                    f"the rule {rule.rule!r} of {rule.path} reads {read}, which may be missing: test it with "
                    f"has({read}), or write the rule for spec (dovetail.manifest.checks.cel says why)"
                )
            assert not has or steps[-1].strip("_") in node["properties"], (rule.path, reference)


def test_columns_and_names():
    assert [c["name"] for c in VERSION["additionalPrinterColumns"] if c["priority"] == 0] == [
        *("State", "Stage", "Iteration", "Reward", "Samples/s", "Age")
    ]
    assert VERSION["subresources"] == {"status": {}}
    assert crd()["metadata"]["name"] == "rlhfjobs.dovetail.dev"
    for column in VERSION["additionalPrinterColumns"]:
        steps = column["jsonPath"].split("[")[0].strip(".").split(".")
        node = ROOT_SCHEMA
        if steps[0] != "metadata":
            for step in steps:
                node = node["properties"][step]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart.yaml", "hh-rlhf.yaml"])
def test_examples_fit_the_json_schema(name):
    schema = json.loads((ROOT / "docs" / "schema" / "rlhfjob.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    manifest = yaml.safe_load((ROOT / "examples" / name).read_text())
    jsonschema.validate(manifest, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest | {"extra": 1}, schema)


def test_the_reference_page_has_every_object():
    page = (ROOT / "docs" / "reference.md").read_text()
    assert f"## {RLHFJob.__name__}" in page
    for link in re.findall(r"\(#(\w+)\)", page):
        assert re.search(rf"^## {link}$", page, re.IGNORECASE | re.MULTILINE), link
    assert "`globalBatchSize` | integer | `64`" in page
