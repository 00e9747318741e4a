"""Finds the GPUs that this machine offers, without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def cuda_devices(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> list[str]:
    """The ids to put into CUDA_VISIBLE_DEVICES. They are those that the user made visible, or else one number for each
    NVIDIA device file."""
    present = sum(1 for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return [str(i) for i in range(present)]
    ids: list[str] = []
    for device in (part.strip() for part in visible.split(",")):
        if device in ("", "-1"):
            break  # CUDA ignores everything after an invalid entry
        ids.append(device)
    return ids
