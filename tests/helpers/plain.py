"""A job of nothing but defaults, whose model nobody knows."""

from __future__ import annotations

import yaml

from dovetail.manifest.checks.validation import load_manifest
from dovetail.manifest.types import API_VERSION, RLHFJobSpec


def plain_spec(trainers: int = 1, rollouts: int = 1, **changes: object) -> RLHFJobSpec:
    """With `changes` to its spec."""
    spec = {
        "models": {"actor": {"source": {"huggingFace": "a/b"}}},
        "data": {name: [{"synthetic": {}}] for name in ("demonstrations", "preferences", "prompts")},
        "groups": [
            {"name": "t", "roles": ["trainer"], "replicas": trainers},
            {"name": "r", "roles": ["rollout"], "replicas": rollouts},
        ],
    }
    manifest = {"apiVersion": API_VERSION, "kind": "RLHFJob", "metadata": {"name": "job"}, "spec": spec | changes}
    return load_manifest(yaml.safe_dump(manifest)).spec
