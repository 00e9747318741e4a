"""The sdist and the wheel that would be published, installed apart from this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
PACKAGES = sorted(path.name for path in ROOT.glob("*/dovetail/*") if any(path.glob("*.py")))
# The rest of the environment (a registry's address, certificates) is the user's.
LEFT_OUT = {"PYTHONPATH", "VIRTUAL_ENV", "MYPYPATH"}


def call(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    words = list(map(str, command))
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=1200, check=False)


def uv(*command: object, folder: Path) -> None:
    """From uv's cache if it has everything, else from the registry."""
    if call(UV, *command, "--offline", folder=folder).returncode:
        done = call(UV, *command, folder=folder)
        assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel and nothing but its own requirements. `source`: the unpacked sdist."""

    python: Path
    source: Path
    folder: Path

    def dovetail(self, *words: object) -> subprocess.CompletedProcess[str]:
        return call(self.python.parent / "dovetail", *words, folder=self.folder)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("packaging")
    # The wheel is built from the sdist, so what the sdist lacks is missed here.
    uv("build", "--quiet", "--out-dir", folder / "dist", ROOT, folder=folder)
    with tarfile.open(next((folder / "dist").glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    python = folder / "clean" / "bin" / "python"
    uv("venv", "--quiet", "--python", sys.executable, folder / "clean", folder=folder)
    wheel = next((folder / "dist").glob("*.whl"))
    uv("pip", "install", "--quiet", "--python", python, "-c", ROOT / "requirements/cpu.txt", wheel, folder=folder)
    return Installed(python, next(folder.glob("dovetail_rlhf-*/")), folder)


def test_the_version_is_pyproject_s(installed: Installed) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert installed.dovetail("--version").stdout == f"dovetail {version}\n"


def test_the_run_page_and_its_demo_are_in_the_wheel(installed: Installed) -> None:
    site = next(installed.python.parents[1].glob("lib/*/site-packages/dovetail"))
    packed = {path.name for path in (site / "web" / "static").iterdir()}
    assert packed == {path.name for path in (ROOT / "src/dovetail/web/static").iterdir()}
    assert (site / "tools" / "run_page" / "demo.json.xz").is_file()


def test_a_job_is_checked_explained_and_planned_without_any_extra(installed: Installed) -> None:
    example = installed.source / "examples" / "quickstart.yaml"
    checked = installed.dovetail("validate", example)
    assert "is valid: quickstart" in checked.stdout, checked.stderr
    assert "iterations" in installed.dovetail("explain", "RLHFJob.spec.ppo").stdout
    planned = installed.dovetail("plan", example)
    assert "trainer-1" in planned.stdout, planned.stderr
    # A model of the hub, and GPUs whose data sheets are a file of the wheel.
    large = installed.dovetail("plan", installed.source / "examples" / "rlhf-65b.yaml")
    assert large.returncode == 0, large.stderr
    assert "Traceback" not in installed.dovetail("validate", installed.source / "examples" / "hh-rlhf.yaml").stderr


def test_a_missing_extra_is_named_with_the_command_that_installs_it(installed: Installed) -> None:
    example = installed.source / "examples" / "quickstart.yaml"
    run = installed.dovetail("run", example)
    assert (run.returncode, run.stderr.splitlines()[-1]) == (
        2,
        "Error: dovetail run needs the extras 'coordinator' and 'rollout-cpu': "
        "pip install 'dovetail-rlhf[coordinator,rollout-cpu]'",
    )
    assert not (installed.folder / "runs").exists()
    chat = installed.dovetail("chat", "runs/quickstart")
    assert chat.stderr == "Error: dovetail chat needs the extra 'trainer': pip install 'dovetail-rlhf[trainer]'\n"
    assert "dovetail profile needs the extras" in installed.dovetail("profile", example).stderr


@pytest.mark.parametrize(
    ("module", "extra"),
    [("dovetail.client", "client"), ("dovetail.local.pipeline", "coordinator"), ("dovetail.local.llm", "coordinator")],
)
def test_the_python_apis_name_a_missing_extra(installed: Installed, module: str, extra: str) -> None:
    done = call(installed.python, "-c", f"import {module}", folder=installed.folder)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {module} needs the extra '{extra}': pip install 'dovetail-rlhf[{extra}]'"
    )


def test_type_checkers_see_the_types_of_every_package(installed: Installed) -> None:
    """PEP 561: of a namespace package each part needs a py.typed of its own, which mypy looks for even where it skips
    what it finds."""
    user = installed.folder / "user.py"
    user.write_text("".join(f"import dovetail.{name}\n" for name in PACKAGES))
    mypy = [sys.executable, "-m", "mypy", "--python-executable", installed.python, "--cache-dir", os.devnull]
    done = call(*mypy, "--follow-imports", "skip", user, folder=installed.folder)
    assert done.returncode == 0, done.stdout
    # Without the marker it would have failed.
    (marker,) = installed.python.parents[1].glob("lib/*/site-packages/dovetail/planner/py.typed")
    marker.unlink()
    done = call(*mypy, "--follow-imports", "skip", user, folder=installed.folder)
    assert re.search(r'"dovetail\.planner": module is installed, but missing .*py\.typed', done.stdout), done.stdout
