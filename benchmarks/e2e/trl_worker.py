"""One run of TRL's GRPOTrainer in a process of its own: `python -m e2e.trl_worker BASE SETTINGS OUT`.

OUT gets a JSON list of the CPU seconds and the wall seconds of this process when each iteration had ended."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from race import trl_grpo
from transformers import TrainerCallback


class Marks(TrainerCallback):  # type: ignore[misc]
    """Notes the times after each optimizer step. A setting with one step an iteration is meant."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.found.append((time.process_time(), time.time() - psutil.Process().create_time()))


def main() -> None:
    base, settings, out = (Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)
    marks = Marks()
    trl_grpo.run(base, json.loads(settings.read_text()), 0, out.parent / "model", callbacks=[marks])
    out.write_text(json.dumps(marks.found))


if __name__ == "__main__":
    main()
