"""Provides what vLLM must know about a model's class before it serves the model on GPUs.

vLLM imports the class in a process of its own, which takes about ten seconds, and keeps the answer below
VLLM_CACHE_ROOT. (A server on CPUs looks itself: `compat.inspect_models_here`.) A pod starts with an empty cache, so an
image contains the answers:

    python -m dovetail.rollout.serving.model_infos

writes the answers for all model families into the installation that runs it. vLLM compares each with a hash of the
class's source, so it never uses an answer of another vLLM."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from dovetail.manifest.model_families import MODEL_FAMILIES

BROUGHT = Path(sys.prefix) / "share/dovetail/vllm-model-infos"


def main() -> int:
    """Write the answers. Returns 0 even if vLLM cannot import a class on this machine. A server then asks again."""
    from dovetail.rollout.compat import find_model_info, model_infos

    BROUGHT.mkdir(parents=True, exist_ok=True)
    for family in MODEL_FAMILIES.values():
        try:
            name = find_model_info(family.causal_lm)
            shutil.copyfile(model_infos() / name, BROUGHT / name)
        except (LookupError, OSError, RuntimeError) as error:
            print(f"{family.causal_lm}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
    return 0


def use_brought(brought: Path = BROUGHT) -> None:
    """Put the answers of the installation where vLLM looks for them, unless it has some already."""
    from dovetail.rollout.compat import model_infos

    try:
        for path in brought.glob("*.json"):
            there = model_infos() / path.name
            if not there.exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                # Another process may look at the same moment.
                shutil.copyfile(path, partial := there.with_name(f".{path.name}.{os.getpid()}"))
                partial.replace(there)
    except OSError as error:
        print(f"dovetail rollout server: vLLM's cache cannot be written: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
