"""Workers get all files, few at once of those that start many processes, and none holds back its last test."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.lanes import HEAVY, Lanes


class Worker:
    """As the scheduler sees it. Like a real one it runs a test only once it knows the next one, or that there is
    none."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.waiting = list[int]()
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def able(self) -> bool:
        return len(self.waiting) > (0 if self.shutting_down else 1)


def file_of(test: str) -> str:
    return test.partition("::")[0]


def run(tests: list[str], count: int, rng: random.Random) -> tuple[list[str], int]:
    """The tests as they were run, by workers of random speeds, and of how many heavy files tests ran at once."""
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: [f"{count}*popen"])
    lanes = Lanes(config, None, file_of, lambda file: file.startswith("heavy"))
    workers: list[Any] = [Worker(number) for number in range(count)]
    for worker in workers:
        lanes.add_node(worker)
    for worker in workers:
        lanes.add_node_collection(worker, tests)
    lanes.schedule()
    ran, most = list[str](), 0
    while lanes.has_pending:
        running = [worker for worker in workers if worker.able()]
        assert running, "a worker waits for what nobody will send"
        most = max(most, sum(tests[worker.waiting[0]].startswith("heavy") for worker in running))
        worker = rng.choice(running)
        ran.append(tests[worker.waiting[0]])
        lanes.mark_test_complete(worker, worker.waiting.pop(0))
        if lanes.tests_finished:
            for each in workers:
                each.shutdown()
    return ran, most


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_tests_run_and_few_heavy_files_at_once(count: int) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        kinds = [("heavy", rng.randint(0, 6)), ("light", rng.randint(0, 12))]
        tests = [f"{kind}{f}::{t}" for kind, files in kinds for f in range(files) for t in range(rng.randint(1, 5))]
        ran, most = run(tests, count, rng) if tests else ([], 0)
        assert sorted(ran) == sorted(tests), seed
        assert most <= HEAVY, seed


def test_light_files_run_beside_heavy_ones_from_the_start() -> None:
    tests = [f"{kind}{f}::{t}" for kind in ("heavy", "light") for f in range(4) for t in range(4)]
    ran, most = run(tests, 4, random.Random(0))
    assert most == HEAVY
    assert {file_of(test)[:5] for test in ran[:8]} == {"heavy", "light"}
