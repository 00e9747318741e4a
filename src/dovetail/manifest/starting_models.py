"""Says from which model's source a model starts."""

from __future__ import annotations

from dovetail.manifest.types import RLHFJobSpec

# A model starts from the first of these that has a source.
_CANDIDATES = {
    "actor": ("actor",),
    "reference": ("reference", "actor"),
    "reward": ("reward", "actor"),
    "critic": ("critic", "reward", "actor"),
}
# The models that a job may train.
TRAINED = ("actor", "reward", "critic")


def owner(spec: RLHFJobSpec, model: str) -> str | None:
    """The model whose source `model` starts from. None if none of them has a source."""
    return next((name for name in _CANDIDATES[model] if getattr(spec.models, name).source is not None), None)
