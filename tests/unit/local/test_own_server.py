"""A server that a program started for itself ends with the program, however that ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dovetail.local import llm
from dovetail.local.llm import LLM
from dovetail.protocol.errors import RunError
from dovetail.tools.serving import served_result
from helpers.model_folder import save_model_folder
from helpers.patience import PATIENCE

# As vLLM, it has a process below it.
SERVER = """
import http.server, os, subprocess, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), below.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
PROGRAM = """
import os, signal, sys
from pathlib import Path
from dovetail.tools.serving import served_result

folder, server = Path(sys.argv[1]), sys.argv[2]
os.environ["PYTHONPATH"] = str(folder)
(folder / "small_server.py").write_text(server)
served_result.serve_command = lambda _, given: [*"python -P -m small_server".split(), given[given.index("--port") + 1]]
with served_result.own_server(folder, "actor", False, folder / "log", lambda _: None):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_program_that_is_killed_leaves_no_server(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), SERVER], timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("pids ")]
    pids = [int(pid) for pid in line.split()[1:]]
    try:
        end = time.monotonic() + 60
        while any(map(lives, pids)):
            assert time.monotonic() < end, "they hold the memory of a GPU for ever"
            time.sleep(0.05)
    finally:
        for pid in filter(lives, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_servers_that_still_start_are_not_waited_for_once_another_has_failed(tmp_path, monkeypatch):
    """They have a quarter of an hour."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "fails.py").write_text("raise ValueError('no such argument')")
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(900)")
    modules = ["fails", "sleeps"]
    monkeypatch.setattr(served_result, "serve_command", lambda *_: ["python", "-P", "-m", modules.pop(0)])
    monkeypatch.setattr(llm, "cuda_devices", list)
    made = LLM(save_model_folder(tmp_path / "model"), servers=2, log_dir=tmp_path)
    with pytest.raises(RunError, match="ValueError: no such argument"):
        made.open()
    commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    assert not any("-m sleeps" in command for command in commands)
