"""Starts processes on the null GPU: `python worker.py <folder>`.

Each line of standard input is a scenario as JSON: {"name", "do", "world", ...}. `do` is "module.function" of
`programs/`. Each of the `world` ranks calls the function in a process of its own. The ranks are forked, so that one
import of torch serves all scenarios. An optional "patience" says after how many seconds ranks that wait are stuck.

A line of standard output is the answer: "statuses" of the ranks, "waits" (what each rank that was stuck waited for),
"results" and "seconds". A scenario ends early when its ranks are stuck."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# How often to look at what ranks wait for, seconds. The end of a rank is seen at once.
LOOK = 0.2


@dataclass
class Place:
    """What a rank of a scenario knows: its rank, a port for the ranks to meet, and a folder for their files."""

    rank: int
    world: int
    port: int
    folder: Path


Program = Callable[..., Any]
sys.path.append(str(Path(__file__).parents[1]))

from helpers.free_ports import free_port  # noqa: E402
from helpers.patience import PATIENCE  # noqa: E402


def program(name: str) -> Program:
    module, _, function = name.partition(".")
    found: Program = getattr(importlib.import_module(f"programs.{module}"), function)
    return found


def child(place: Place, do: Program, scenario: dict[str, Any]) -> None:
    """Run one rank in this (forked) process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    log = os.open(place.folder / f"rank-{place.rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"NULLGPU_RANK": str(place.rank), "NULLGPU_MEETINGS": str(place.folder / "meetings")}
    faulthandler.register(signal.SIGUSR1)
    status = 1
    # A forked process must make torch's pool of threads anew. Two threads that did so at once would end it.
    torch.set_num_threads(torch.get_num_threads())
    try:
        result = do(place, **scenario)
        (place.folder / f"result-{place.rank}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def waits(folder: Path) -> dict[str, str]:
    """What ranks wait for, by rank: the null GPU says so after a second."""
    found = {}
    for path in (folder / "meetings").glob("waits-?"):
        try:
            found[path.name.removeprefix("waits-")] = path.read_text().strip()
        except FileNotFoundError:
            continue  # the wait has just ended
    return found


def run(
    folder: Path,
    name: str,
    do: str,
    world: int = 1,
    patience: float = PATIENCE,
    **more: Any,
) -> dict[str, Any]:
    """All ranks of one scenario, until they end, are stuck, or the deadline has passed. `more` goes to the program."""
    folder = folder / name
    (folder / "meetings").mkdir(parents=True)
    function, port = program(do), free_port()
    gc.freeze()  # keeps the ranks' collectors from touching, and so copying, the shared pages
    pids: dict[int, int] = {}
    for rank in range(world):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            child(Place(rank, world, port, folder), function, more)
    statuses: dict[int, int] = {}
    started = since = time.monotonic()
    stuck: dict[str, str] = {}
    while len(statuses) < len(pids) and time.monotonic() < started + PATIENCE:
        for rank in set(pids) - set(statuses):
            done, status = os.waitpid(pids[rank], os.WNOHANG)
            if done:
                statuses[rank] = os.waitstatus_to_exitcode(status)
        now = {rank: wait for rank, wait in waits(folder).items() if int(rank) not in statuses}
        if now != stuck:
            stuck, since = now, time.monotonic()
        if stuck and len(stuck) == len(pids) - len(statuses) and time.monotonic() > since + patience:
            break
        signal.sigtimedwait({signal.SIGCHLD}, LOOK)
    for rank in set(pids) - set(statuses):
        os.kill(pids[rank], signal.SIGUSR1)  # where it stood, for the log
        time.sleep(0.2)
        os.kill(pids[rank], signal.SIGKILL)
        statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
    results = {r: json.loads(p.read_text()) for r in pids if (p := folder / f"result-{r}.json").exists()}
    return {
        "statuses": [statuses[rank] for rank in sorted(pids)],
        "waits": stuck,
        "results": [results.get(rank) for rank in sorted(pids)],
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # `run` waits for it
    for line in sys.stdin:
        print(json.dumps(run(folder, **json.loads(line))), file=answers, flush=True)
    os._exit(0)  # torch takes seconds to unload


if __name__ == "__main__":
    main()
