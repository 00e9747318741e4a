"""What `make same-bits` takes for the same, which difference it names, and which tests it runs."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed import checkpoint as dcp

from dovetail.coordinator.store.database import SCHEMA

sys.path.insert(0, str(Path(__file__).parents[3] / "hack"))
from same_bits.__main__ import declared, imported, nearest_tests

from dovetail.tools.run_facts import difference, read_facts


def write_run(run: Path, clock: float) -> Path:
    """A run of two iterations, as far as the judge reads it. `clock`: a number for all that is measured."""
    for folder in ("samples", "checkpoints", "models/actor"):
        (run / folder).mkdir(parents=True)
    (run / "job.json").write_text(json.dumps({"spec": {"seed": 3, "importPath": str(run.parent)}}))
    (run / "plan.json").write_text(json.dumps({"lag": 1, "tasks": []}))
    rows = [{"stage": "ppo", "step": i, "time": clock, "metrics": {"loss": 0.5 / i, "seconds": clock}} for i in (1, 2)]
    (run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for i in (1, 2):
        sample = {"iteration": i, "prompt_index": 0, "sample_index": 0, "response": "a b", "assignments": int(clock)}
        (run / f"samples/iteration-{i:06d}.jsonl").write_text(json.dumps(sample) + "\n")
        weights = {"actor.parameters.head": torch.tensor([1.0 + i, -2.0], dtype=torch.bfloat16)}
        moments = {"actor.first_moments.head": torch.tensor([0.5 * i, 0.0])}
        dcp.save(weights | moments, checkpoint_id=run / f"checkpoints/ppo-{i:06d}", no_dist=True)
    save_file({"head": np.array([3.0, -2.0], np.float32)}, run / "models/actor/model.safetensors")
    (run / "models/actor/README.md").write_text(f"It took {clock} s.")
    with closing(sqlite3.connect(run / "store.sqlite")) as database:
        database.executescript(SCHEMA)
        insert = (
            "INSERT INTO samples (iteration, prompt_index, sample_index, state, prompt, seed, fields, incarnation, "
            "response) VALUES (2, ?, 0, 'trained', x'0100', ?, '{}', ?, x'0200')"
        )
        database.executemany(insert, [(prompt, 70 + prompt, str(clock)) for prompt in (0, 1)])
        kept = {"ppo/2/batch": "ab", f"result/publish/2/{clock:.0f}": {"ok": True}, "job/seconds": clock}
        kept["folders/models/sft"] = {"config.json": [123, int(clock)]}
        kept["run/spec"] = {"importPath": str(run.parent)}
        kept["result/ppo/2/step"] = {"metrics": {"loss": 0.25, "seconds": clock}, "times": [clock]}
        database.executemany("INSERT INTO kv VALUES (?, ?)", [(key, json.dumps(value)) for key, value in kept.items()])
        database.commit()
    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("base") / "run", 1.0)


def test_another_time_and_place_are_no_difference(base: Path, tmp_path: Path) -> None:
    assert difference(read_facts(base), read_facts(write_run(tmp_path / "run", 20.0))) is None


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new, 1))

    return change


def query(statement: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with closing(sqlite3.connect(run / "store.sqlite")) as database:
            assert database.execute(statement).rowcount > 0
            database.commit()

    return change


def flip_sign(run: Path) -> None:
    """Of the zero in the moments after the second iteration: the numbers stay equal, the bits do not."""
    weights = {"actor.parameters.head": torch.tensor([3.0, -2.0], dtype=torch.bfloat16)}
    moments = {"actor.first_moments.head": torch.tensor([1.0, -0.0])}
    shutil.rmtree(run / "checkpoints/ppo-000002")
    dcp.save(weights | moments, checkpoint_id=run / "checkpoints/ppo-000002", no_dist=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (edit("job.json", '"seed": 3', '"seed": 4'), "job.json: spec.seed is 3 at BASE and 4 now"),
        (edit("plan.json", ', "tasks": []', ""), "plan.json: tasks is [] at BASE and missing now"),
        (edit("history.jsonl", "0.25", "-0.25"), "history row ppo 2: loss is 0.25 at BASE and -0.25 now"),
        (
            edit("samples/iteration-000001.jsonl", "a b", "a  b"),
            "iteration-000001.jsonl: prompt 0, sample 0 differs",
        ),
        (query("DELETE FROM samples WHERE prompt_index = 1"), "store rows of samples: critic_version at iteration 2,"),
        (query("UPDATE samples SET response = x'0300'"), "store rows of samples: response at iteration 2, prompt 0,"),
        (
            query("UPDATE kv SET value = '\"ac\"' WHERE value = '\"ab\"'"),
            'ppo/2/batch is "ab" at BASE and "ac" now',
        ),
        (flip_sign, "first moments of the actor after PPO iteration 2: tensor head differs"),
    ],
)
def test_the_first_difference_is_named(
    base: Path, tmp_path: Path, change: Callable[[Path], None], sentence: str
) -> None:
    run = write_run(tmp_path / "run", 2.0)
    change(run)
    told = difference(read_facts(base), read_facts(run))
    assert told is not None
    assert sentence in told.partition("; then ")[0]


def test_one_difference_of_each_kind_is_named_the_earliest_first(base: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2.0)
    flip_sign(run)
    edit("history.jsonl", "0.5", "0.125")(run)
    edit("history.jsonl", "0.25", "0.125")(run)
    told = difference(read_facts(base), read_facts(run)) or ""
    history, weights = told.split("; then ")
    assert history == "history row ppo 1: loss is 0.5 at BASE and 0.125 now"
    assert weights.startswith("first moments of the actor after PPO iteration 2: tensor head differs ")
    assert "(3 of " in weights


def test_commits_declare_bits() -> None:
    assert declared("Sum in float64\n\nOf many.\n\nBits: losses, in the last place\n") == ["losses, in the last place"]
    assert declared("Say what Bits: means") == []


def test_tests_near_a_change_are_those_that_import_it() -> None:
    tests = {
        "tests/unit/a/test_policy.py": "from dovetail.trainer.algorithms import policy",
        "tests/unit/a/test_many.py": "import dovetail.planner\nfrom dovetail.trainer.algorithms.policy import loss",
        "tests/unit/a/test_none.py": "from dovetail.trainer.algorithms.policy_loss import loss",
        "tests/unit/b/test_new.py": "",
    }
    changed = ["trainer_image/dovetail/trainer/algorithms/policy.py", "tests/unit/b/test_new.py", "docs/index.md"]
    assert nearest_tests(changed, tests) == [
        "tests/unit/b/test_new.py",
        "tests/unit/a/test_policy.py",
        "tests/unit/a/test_many.py",
    ]
    # Nobody imports this one: the tests of its folder's other modules are the nearest.
    assert nearest_tests(["trainer_image/dovetail/trainer/algorithms/kl.py"], tests, 1) == ["tests/unit/a/test_none.py"]
    assert nearest_tests(["docs/index.md"], tests) == []
    assert "dovetail.trainer.algorithms.policy" in imported(tests["tests/unit/a/test_policy.py"])
