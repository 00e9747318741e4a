"""The private parts of CPython that supervision uses do what they did."""

import os
import subprocess
import sys

from helpers.patience import PATIENCE

# A forked child with a thread that has not ended yet, an exit function and text that is not flushed yet.
CHILD = """
import atexit, os, threading, time
from dovetail.launch.compat import end_interpreter
if os.fork() == 0:
    atexit.register(lambda: print("exit function"))
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    end_interpreter()
    os._exit(7)
print("parent", os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_forked_child_waits_for_threads_and_runs_its_exit_functions_once():
    told = subprocess.run(
        [sys.executable, "-c", CHILD], env=dict(os.environ), capture_output=True, text=True, timeout=PATIENCE
    )
    assert told.stdout.split("\n") == ["thread", "exit function", "parent 7", ""], told.stderr
