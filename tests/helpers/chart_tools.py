"""Programs that look at the Helm chart, and the Kubernetes API's schemas for kubeconform."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "hack/devcluster"))

from devcluster import binaries  # noqa: E402

from helpers.patience import PATIENCE  # noqa: E402

CHART = REPOSITORY / "helm" / "dovetail"


def tool(program: str) -> str:
    """The program that `make tools` has built, or the PATH's. Skips where there is no Go to build it with."""
    if binaries.folder(program).is_dir():  # a module of its own
        return str(binaries.path_of(program))
    found = shutil.which(program)
    if found:
        return found
    if shutil.which("go") is None:
        pytest.skip(f"{program} is not on the PATH, and there is no Go to build it")
    pytest.fail(f"{program} is not built yet: run make tools")


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False, **options)


def template(*words: str, release: str = "dovetail", namespace: str = "dovetail-system") -> str:
    """`helm template`; AssertionError with what helm says if it fails."""
    done = run(tool("helm"), "template", release, str(CHART), "--namespace", namespace, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kubernetes_schemas(folder: Path) -> str:
    """Strict JSON schemas of the Kubernetes release that hack/devcluster builds, from the OpenAPI document in its
    source; returns kubeconform's -schema-location."""
    if shutil.which("go") is None:
        pytest.skip("there is no Go to fetch Kubernetes' OpenAPI document with")
    source = binaries.module_folder("kubernetes", "k8s.io/kubernetes") / "api/openapi-spec/swagger.json"
    definitions = json.loads(source.read_text(encoding="utf-8"))["definitions"]
    for name, schema in definitions.items():
        if name.endswith(("IntOrString", "Quantity")):
            schema.pop("type", None)
        elif "properties" in schema:
            schema.setdefault("additionalProperties", False)
    # Of a CustomResourceDefinition: any schema.
    definitions["io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps"] = {"type": "object"}
    (folder / "all.json").write_text(json.dumps({"definitions": definitions}))
    for name, schema in definitions.items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            group = kind["group"].partition(".")[0]
            parts = [kind["kind"].lower(), *([group] if group else []), kind["version"]]
            reference = {"$ref": f"{(folder / 'all.json').as_uri()}#/definitions/{name}"}
            (folder / f"{'-'.join(parts)}.json").write_text(json.dumps(reference))
    return str(folder / "{{ .ResourceKind }}{{ .KindSuffix }}.json")
