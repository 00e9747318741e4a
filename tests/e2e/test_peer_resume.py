"""docs/how-to/peer-resume.md: what a resume of TRL's GRPOTrainer loses, and what `dovetail audit` says of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def train(folder: Path, *arguments: str) -> int:
    program = [sys.executable, str(ROOT / "examples/peers/trl_resume.py"), str(folder), *arguments]
    run = subprocess.run(program, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=PATIENCE, check=False)
    return run.returncode


def audit(undisturbed: Path, resumed: Path) -> subprocess.CompletedProcess[str]:
    program = [Path(sys.executable).with_name("dovetail"), "audit", undisturbed, "--against", resumed]
    return subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.nightly
def test_a_resume_amid_a_generation_loses_prompts(tmp_path: Path) -> None:
    assert train(tmp_path / "undisturbed") == 0
    assert train(tmp_path / "resumed", "--kill-after", "6") == -signal.SIGKILL
    assert train(tmp_path / "resumed") == 0

    found = audit(tmp_path / "undisturbed", tmp_path / "resumed")
    assert found.returncode == 1, found.stdout + found.stderr
    match = re.search(r"(\d+) of 48 prompts .* were lost, and (\d+) repeated", found.stderr)
    assert match, found.stderr
    # Which rows a part of a generation has is TRL's to choose.
    assert all(int(count) > 0 for count in match.groups()), found.stderr
    assert audit(tmp_path / "undisturbed", tmp_path / "undisturbed").returncode == 0
