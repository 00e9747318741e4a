"""A list for another torch or vLLM than the locked ones, for an image whose GPUs these have no kernels for.

    python3 other_torch.py rollout-gpu.txt torch==2.13.0+cu126 vllm-0.32.0+cu126-cp38-abi3-linux_x86_64.whl

prints the lock's packages at their versions, without hashes, and the given ones in place of the lock's. Packages that
belong to a version of CUDA are left out: pip finds those that the given ones ask for. Only the standard library is
used."""

import re
import sys
from pathlib import Path

# Beside torch and vLLM: what exists for one CUDA only, and what needs such a package.
BOUND = re.compile(
    r"(nvidia|cuda|nccl|nixl|flashinfer|tokenspeed|torch|triton|quack|humming|tilelang|instanttensor|vllm)([-0-9a-z]*)$"
)
_PIN = re.compile(r"([\w.-]+)==(\S+)( ; .*?)?( \\)?$")
_WHEEL = re.compile(r"([^/]+?)-[^/]+\.whl$")


def name_of(requirement: str) -> str:
    """The package of `torch==2.13.0`, `torch @ https://...` or of a wheel's path."""
    wheel = _WHEEL.search(requirement)
    name = wheel[1] if wheel else re.match(r"[\w.-]*", requirement)[0]
    return name.lower().replace("_", "-").replace(".", "-")


def loosened(lock: str, given: list[str]) -> list[str]:
    """Requirements, one a line. Raises ValueError for a given one that the lock has no package for."""
    pins = [match for line in lock.splitlines() if (match := _PIN.match(line))]
    locked = {name_of(pin[1]) for pin in pins}
    if wrong := [g for g in given if name_of(g) not in locked]:
        raise ValueError(f"{wrong[0]} takes the place of no package of the list; give torch==... or vllm==...")
    replaced = {name_of(g) for g in given}
    kept = [
        f"{pin[1]}=={pin[2]}{pin[3] or ''}"
        for pin in pins
        if name_of(pin[1]) not in replaced and not BOUND.match(name_of(pin[1]))
    ]
    return [*kept, *given]


def main(argv: list[str]) -> int:
    try:
        print("\n".join(loosened(Path(argv[0]).read_text(encoding="utf-8"), argv[1:])))
    except (OSError, ValueError) as error:
        print(f"other_torch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
