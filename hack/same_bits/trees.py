"""Trees of this repository, and what their code computes: each runs from a folder of its own, with the packages of this
checkout's .venv and nothing else of it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.tools import run_facts
from dovetail.tools.run_facts import Fact, read_facts

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = (ROOT / ".venv").resolve()
LOCK = "requirements/cpu.txt"
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
SOURCES = ("src", "trainer_image", "rollout_image", "operator")
JOBS = ("ppo", "grpo")
JOB_SECONDS = 1200
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dovetail/same-bits"
# The job gets these of the caller's variables alone.
INHERITED = ("HOME", "LANG", "PATH", "TMPDIR", "USER", "XDG_CACHE_HOME")


class Failed(Exception):
    """One sentence for the caller."""


def git(*arguments: str, **env: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"git {' '.join(arguments[:2])} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def working_tree() -> str:
    """The id of the tree that a commit of everything here would have."""
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        shutil.copyfile(git("rev-parse", "--path-format=absolute", "--git-path", "index"), index)
        git("add", "--all", GIT_INDEX_FILE=str(index))
        return git("write-tree", GIT_INDEX_FILE=str(index))


@dataclass(frozen=True)
class Tree:
    """A tree of git, by its id. `name`: "base" or "now", which is also its folder's."""

    name: str
    id: str

    @property
    def _folder(self) -> Path:
        return VENV / "same-bits" / self.name

    @property
    def _code(self) -> Path:
        return self._folder / "code"

    @property
    def _python(self) -> Path:
        return self._folder / "venv/bin/python"

    def _lock(self) -> str:
        return git("rev-parse", f"{self.id}:{LOCK}")

    def key(self, job: str) -> Path:
        """The file that keeps the facts of a job: of this code, these packages, this kind of machine, this judge."""
        parts = [git("rev-parse", f"{self.id}:{folder}") for folder in SOURCES]
        parts += [self._lock(), _machine(), PYTHON, job]
        parts += [(HERE / name).read_text() for name in ("trees.py", f"{job}.yaml", "vowels.py")]
        parts.append(Path(run_facts.__file__).read_text())
        return CACHE / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.json"

    def prepare(self) -> None:
        """Write the code into its folder, and make an environment which has it and the packages of its lock."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._code.mkdir(exist_ok=True)
        index = {"GIT_INDEX_FILE": str(self._folder / "index"), "GIT_WORK_TREE": str(self._code)}
        # Files that are the same stay as they are, and so does what Python has compiled of them.
        git("read-tree", "--reset", "-u", self.id, **index)
        packages = self._packages()
        want = f"{packages}\n{git('rev-parse', f'{self.id}:pyproject.toml')}\n"
        installed = self._folder / "installed"
        if not installed.exists() or installed.read_text() != want:
            shutil.rmtree(self._folder / "venv", ignore_errors=True)
            _call([sys.executable, "-m", "venv", "--without-pip", self._folder / "venv"])
            site = next((self._folder / "venv").glob("lib/python*/site-packages"))
            # A line adds a folder, but not what its own .pth files name: the checkout's code.
            (site / "packages.pth").write_text(f"{packages}\n")
            _uv("pip", "install", "--no-deps", "-p", self._python, "--editable", self._code)
            (self._folder / "venv/share").symlink_to(VENV / "share")
            installed.write_text(want)
        script = "import dovetail, json; print(json.dumps(list(dovetail.__path__)))"
        found = json.loads(_call([self._python, "-P", "-c", script], env=_environment()))
        if {Path(path) for path in found} != {self._code / folder / "dovetail" for folder in SOURCES}:
            raise Failed(f"the code of {self.name} would not run from {self._code}, but from {found}")

    def _packages(self) -> Path:
        """The folder of the packages that the tree's lock names."""
        venv = VENV
        if self._lock() != git("hash-object", str(ROOT / LOCK)):
            venv = CACHE / f"packages-{PYTHON}-{self._lock()}"
            if not (venv / "done").exists():
                print(f"{self.name}: installing other packages, as its {LOCK} differs", flush=True)
                shutil.rmtree(venv, ignore_errors=True)
                _uv("venv", "-p", sys.executable, venv)
                _uv("pip", "sync", "--require-hashes", "-p", venv / "bin/python", self._code / LOCK)
                (venv / "done").touch()
        return next(venv.glob("lib/python*/site-packages"))

    def run(self, job: str) -> Path:
        """The folder of a finished run of the job, which is new. Its parent may be deleted."""
        folder = Path(tempfile.mkdtemp(prefix=f"same-bits-{self.name}-"))
        for name in (f"{job}.yaml", "vowels.py"):
            shutil.copyfile(HERE / name, folder / name)
        dovetail = self._folder / "venv/bin/dovetail"
        command: list[str | Path] = [dovetail, "run", f"{job}.yaml", "--run-dir", folder / "run"]
        _call(command, cwd=folder, env=_environment(), kept=folder / "output.txt")
        return folder / "run"

    def facts(self, job: str) -> list[Fact] | None:
        """Those that are kept, or None."""
        with contextlib.suppress(FileNotFoundError):
            return [Fact(tuple(when), *rest) for when, *rest in json.loads(self.key(job).read_text())]
        return None

    def keep(self, job: str, run: Path) -> list[Fact]:
        """The facts of a run, which are kept; the run is deleted."""
        facts = read_facts(run)
        partial = self.key(job).with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(facts))
        partial.rename(self.key(job))
        shutil.rmtree(run.parent)
        return facts


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two judges of one checkout would write the same folders. The second waits."""
    CACHE.mkdir(parents=True, exist_ok=True)
    (VENV / "same-bits").mkdir(exist_ok=True)
    with (VENV / "same-bits/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _machine() -> str:
    """The kind of processor, on which last bits depend."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features"))})
    )


def _environment() -> dict[str, str]:
    mine = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return mine | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DOVETAIL_SPAWN": "fork"}


def _uv(*arguments: str | Path) -> None:
    _call([VENV / "bin/uv", "--quiet", *arguments])


def _call(
    command: Sequence[str | Path], *, cwd: Path = ROOT, env: dict[str, str] | None = None, kept: Path | None = None
) -> str:
    """Its output, or Failed with the end of that. `kept`: the file that has the output then."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=JOB_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{command[0]} ran for {JOB_SECONDS} s") from error
    if kept is not None:
        kept.write_text(done.stdout)
    if done.returncode:
        where = f" ({kept})" if kept is not None else ""
        end = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise Failed(f"{' '.join(str(word) for word in command[:3])} failed{where}:\n{end}")
    return done.stdout
