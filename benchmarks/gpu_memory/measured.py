"""Cases on the null GPU: by the programs of tests/nullgpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_memory.cases import Case

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Device:
    """Bytes at the peak of the rank that reserves most. `pinned`: in page-locked host memory."""

    allocated: int
    reserved: int
    pinned: int
    seconds: float


def environment() -> dict[str, str]:
    """Of a process on the null GPU. Ends this process where there is none."""
    asked = subprocess.run(
        [sys.executable, str(ROOT / "hack/nullgpu"), "build"], capture_output=True, text=True, timeout=300
    )
    if asked.returncode:
        sys.exit(asked.stderr.strip())
    library = Path(asked.stdout.strip())
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }


def scenario(case: Case) -> dict[str, Any]:
    """What tests/nullgpu/worker.py is asked to run."""
    if case.scores:
        models = {name: case.actor if name == "reference" else case.critic or case.actor for name in case.scores}
        more = {"prompt": case.prompt, "response": case.response, "stages": case.pp}
        return {"do": "memory.score", "world": 1, "models": models, **more}
    models = {"actor": case.actor} | ({} if case.critic is None else {"critic": case.critic})
    optimizer = {"offload": case.offload}
    ppo = {"actor_optimizer": optimizer, "critic_optimizer": optimizer} | ({"ema": 0.9} if case.ema else {})
    lora = {"lora": {"rank": case.lora}} if case.lora else {}
    # Compiled layers need somewhat less memory, and much time to compile.
    settings: dict[str, Any] = {
        "trainer": {"compile": "Never"},
        "ppo": ppo,
        "models": {name: dict(lora) for name in models},
    }
    if case.shared:
        settings["models"]["critic"] = {"share_actor_body": True}
    return {
        "do": "memory.train",
        "world": case.world,
        "models": models,
        "spec": settings,
        **{name: getattr(case, name) for name in ("pp", "dp", "tp", "rows", "prompt", "response", "micro_batches")},
        "schedule": list(case.schedule) or None,
        "reverse": bool(case.schedule),
        "critic_pp": case.critic_pp,
        "chunks": case.chunks,
        "recompute": case.recompute,
        "zero3": case.zero3,
        "shared": case.shared,
    }


class Measuring:
    """Measures cases, one at a time, in ranks that one process forks."""

    def __enter__(self) -> Measuring:
        self._folder = tempfile.TemporaryDirectory()
        self._worker = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/nullgpu/worker.py"), self._folder.name],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait()
        self._folder.cleanup()

    def run(self, case: Case) -> Device:
        """Raises RuntimeError with the ranks' logs."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        name = case.name.replace(" ", "-").replace("/", "-")
        print(json.dumps({"name": name, **scenario(case)}), file=self._worker.stdin, flush=True)
        answer = json.loads(self._worker.stdout.readline())
        if any(answer["statuses"]):
            logs = [path.read_text(errors="replace")[-4000:] for path in Path(self._folder.name, name).glob("*.log")]
            raise RuntimeError(f"{case.name}: {answer['statuses']} {answer['waits']}\n" + "\n".join(logs))
        most = max(answer["results"], key=lambda result: int(result["reserved"]))
        return Device(most["allocated"], most["reserved"], most["pinned"], answer["seconds"])
