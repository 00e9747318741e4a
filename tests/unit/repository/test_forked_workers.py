"""Workers of the tests are forked from a process that has collected them; where that fails, they collect themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.patience import PATIENCE

TESTS = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
CONFTEST = """
from helpers import forked_workers

def pytest_xdist_setupnodes(config, specs):
    forked_workers.begin(config, specs)

def pytest_collection_finish():
    forked_workers.keep_path()
"""
FILE = """
import os, sys, threading, time
from pathlib import Path
import pytest

IMPORTED = os.getpid()
HERE = Path(__file__).parent
open(HERE / "imports", "a").write("one\\n")
sys.path.insert(0, str(HERE / "more"))

@pytest.mark.parametrize("number", range(6))
def test_forked(number, tmp_path):
    print("said by", number)
    assert os.getpid() != IMPORTED
    assert os.environ["PYTEST_XDIST_WORKER"] in str(tmp_path)
    assert os.read(0, 1) == b""
    assert str(HERE / "more") in sys.path

def test_dies():
    os._exit(3)

def test_fails():
    print("said by the one that fails")
    assert IMPORTED == 0

@pytest.mark.skipif(not os.environ.get("WAITS"), reason="only asked for by one test")
def test_waits():
    (HERE / "waits").touch()
    time.sleep(600)
"""


def run(folder: Path, file: str, **more: str) -> subprocess.Popen[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(file)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-n2", "-p", "no:cacheprovider", "--basetemp", folder / "temporary", folder],
        env=env | {"PYTHONPATH": str(TESTS)} | more,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def alive(session: int) -> list[str]:
    found = subprocess.run(["ps", "-o", "stat=,args=", "-s", str(session)], capture_output=True, text=True, check=False)
    # Init takes a moment to wait for those whose parent has ended.
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


def test_a_worker_has_the_imports_and_another_takes_the_place_of_one_that_dies(tmp_path: Path) -> None:
    with run(tmp_path, FILE) as process:
        said, _ = process.communicate(timeout=PATIENCE)
    assert "2 failed, 6 passed, 1 skipped" in said, said
    assert "crashed while running" in said
    assert "said by the one that fails" in said
    assert (tmp_path / "imports").read_text() == "one\n"
    assert not alive(process.pid)


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with run(tmp_path, "import nothing_of_this_name") as process:
        said, _ = process.communicate(timeout=PATIENCE)
    assert "No module named 'nothing_of_this_name'" in said, said
    assert process.returncode


def test_what_runs_threads_when_imported_is_not_forked(tmp_path: Path) -> None:
    thread = "\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    with run(tmp_path, FILE.replace("os.getpid() != IMPORTED", "os.getpid() == IMPORTED") + thread) as process:
        said, _ = process.communicate(timeout=PATIENCE)
    assert "2 failed, 6 passed, 1 skipped" in said, said
    assert "a module that these import has threads" in said


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    with run(tmp_path, FILE, WAITS="yes") as process:
        while not (tmp_path / "waits").exists():
            assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE)
    assert "KeyboardInterrupt" in said
    assert not alive(process.pid)
