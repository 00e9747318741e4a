"""Reward functions in worker processes: one sentence for every way to fail, and what is called when."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dovetail.coordinator import main as coordinator_main
from dovetail.coordinator.data.prepare import PromptRecord, prepare
from dovetail.coordinator.data.text.texts import ResponseText
from dovetail.coordinator.loop.engines import CoordinatorSettings, Engines
from dovetail.coordinator.rewards.calls import Call, Calls, Function, RewardAnswer, RewardError, rehearse
from dovetail.coordinator.rewards.live import LiveFunction
from dovetail.coordinator.rewards.workers import Workers
from dovetail.coordinator.samples.reward_stage import Joined, RewardFunctions, Rewards
from dovetail.coordinator.samples.scoring import Finished, Scores
from dovetail.coordinator.store.samples import Assignment, Delta, Key, NewSample, ScoreRow, State
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import RewardModel, RLHFJob
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.process.endings import JOB_FAILED
from dovetail.protocol.process.env import ProcessEnv
from helpers.cluster import wait_for
from helpers.free_ports import free_port
from helpers.jobs import tiny_job
from helpers.patience import PATIENCE

CODE = """\
import asyncio, ctypes, os, pathlib, sys, time

TRIED = pathlib.Path(__file__).with_name("tried")

def good(prompts, responses, **fields):
    return [float(len(r)) for r in responses]

def key_error(prompts, responses, **fields):
    return fields["score"]

def leaves(prompts, responses, **fields):
    sys.exit(3)

def dies(prompts, responses, **fields):
    os._exit(7)

def crashes(prompts, responses, **fields):
    ctypes.string_at(0)

def inner():
    time.sleep(3600)

def hangs(prompts, responses, **fields):
    inner()

async def hangs_async(prompts, responses, **fields):
    await asyncio.sleep(3600)

def nan(prompts, responses, **fields):
    return [0.5, float("nan")][: len(responses)]

def short(prompts, responses, **fields):
    return [1.0]

def text(prompts, responses, **fields):
    return ["good" for _ in responses]

def nothing(prompts, responses, **fields):
    pass

def one_answer(prompts, responses, **fields):
    return 0.5

def flaky(prompts, responses, **fields):
    tries = len(TRIED.read_text()) if TRIED.exists() else 0
    TRIED.write_text("x" * (tries + 1))
    if tries < 2:
        raise ConnectionError("judge.example: connection refused")
    return [float(tries)] * len(responses)

async def patient(prompts, responses, **fields):
    await asyncio.sleep(0)
    return [2 for _ in responses]

def arrays(prompts, responses, **fields):
    import numpy
    return numpy.arange(len(responses), dtype=numpy.float32) / 3

def talks(prompts, responses, **fields):
    print("a word on stdout", os.getpid())
    os.system("echo another")
    return [1.0] * len(responses)

def accents(prompts, responses, **fields):
    print(*responses)
    print("half \\ud83d", file=sys.stderr)
    return [1.0] * len(responses)

def gold(prompts, responses, gold, **fields):
    return [float(r == g) for r, g in zip(responses, gold)]
gold.needs = "Sample"

def pid(prompts, responses, **fields):
    return [os.getpid()] * len(responses)

def child(prompts, responses, **fields):
    import subprocess
    TRIED.write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
    time.sleep(3600)

def orphan(prompts, responses, **fields):
    import subprocess
    subprocess.run(["setsid", "sh", "-c", f"sleep 3600 & echo $! > {TRIED}"])
    if responses[0] == "dies":
        os._exit(7)
    if responses[0] == "hangs":
        time.sleep(3600)
    return [1.0] * len(responses)

def bar(prompts, responses, **fields):
    # Nearly two million characters without an end of line, and a line of nearly a million.
    for step in range(60_000):
        sys.stderr.write(f"\\r{step:6d}/60000 scoring the answers")
    sys.stderr.write("." * 900_000)
    sys.stderr.flush()
    inner()

def takes(prompts, responses, gold, **fields):
    values = [float(len(responses.pop(0))) for _ in prompts]
    gold[0].append("seen")
    prompts.clear()
    return values

not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def line(name: str) -> int:
    """Of the function in CODE."""
    return next(
        i for i, text in enumerate(CODE.splitlines(), 1) if text.startswith((f"def {name}(", f"async def {name}("))
    )


def reward(*functions: str, **options: Any) -> RewardModel:
    named = [{"function": f"mine:{name}"} for name in functions]
    return RewardModel.model_validate({"functions": named, "workers": 1} | options)


def of(*responses: str, **fields: list[Any]) -> Call:
    return Call(4, 2, ["what?"] * len(responses), list(responses), fields)


def run(
    reward: RewardModel,
    folder: Path,
    work: Callable[[Calls, Workers], Awaitable[Any]],
    retries: int = 0,
    slept: list[float] | None = None,
    log: Callable[..., None] = lambda *_, **__: None,
) -> Any:
    async def sleep(seconds: float) -> None:
        if slept is not None:
            slept.append(seconds)

    async def main() -> Any:
        workers = Workers(reward, folder)
        calls = Calls(workers, retries, log, sleep)
        try:
            await calls.open()
            return await work(calls, workers)
        finally:
            await calls.close()

    before = {p.pid for p in psutil.Process().children()}
    try:
        return asyncio.run(main())
    finally:
        left = [p.pid for p in psutil.Process().children() if p.pid not in before]
        assert not [pid for pid in left if lives(pid)], "no worker outlives the pool"


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def failing(name: str, folder: Path, call: Call, **options: Any) -> str:
    """What the user is told when the function is called on `call`, without being tried again."""

    async def work(calls: Calls, _: Workers) -> None:
        await calls.rewards(0, call)

    with pytest.raises(RewardError) as error:
        run(reward(name, **options), folder, work)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"reward function {name} ({folder}/mine.py:{line(name)}) ")
    assert "on prompt 2 of iteration 4" in text
    return text


@pytest.mark.parametrize(
    ("name", "says", "in_frames"),
    [
        ("key_error", "raised KeyError: 'score'", "mine.py:9 in key_error"),
        ("leaves", "raised SystemExit: 3", "in leaves"),
        ("dies", "ended its worker process with exit code 7", None),
        ("crashes", "crashed its worker process (SIGSEGV)", f"mine.py:{line('crashes') + 1} in crashes"),
        ("nan", "returned nan for response 1; return finite numbers", None),
        ("short", "returned 1 rewards for 2 responses; return one for each", None),
        ("text", "returned 'good' (str) for response 0; return numbers", None),
        ("nothing", "returned a NoneType; return a list with one number for each response", None),
        ("one_answer", "returned a float; return a list", None),
    ],
)
def test_every_failure_is_one_sentence(folder: Path, name: str, says: str, in_frames: str | None) -> None:
    text = failing(name, folder, of("a", "bb"))
    assert f") {says}" in text
    if in_frames is not None:
        assert in_frames in text.partition("last frames: ")[2]
        assert "worker.py" not in text


@pytest.mark.slow
def test_a_hang_ends_at_its_deadline_and_says_where_it_hung(folder: Path) -> None:
    text = failing("hangs", folder, of("a"), timeoutSeconds=1.5)
    assert ") gave no answer within 1.5 s (spec.models.reward.timeoutSeconds)" in text
    assert f"last frames: {folder}/mine.py:{line('hangs') + 1} in hangs, {folder}/mine.py:" in text
    assert text.endswith("in inner")


@pytest.mark.slow
def test_a_coroutine_that_hangs_ends_too(folder: Path) -> None:
    assert "gave no answer within 0.5 s" in failing("hangs_async", folder, of("a"), timeoutSeconds=0.5)


@pytest.mark.slow
def test_what_a_hung_function_started_ends_with_it(folder: Path) -> None:
    failing("child", folder, of("a"), timeoutSeconds=4)
    wait_for("its end", lambda: not lives(int((folder / "tried").read_text())), PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "dies", "hangs"])
def test_what_a_function_started_in_a_session_of_its_own_ends_with_its_worker(folder: Path, how: str) -> None:
    async def work(calls: Calls, _: Workers) -> None:
        try:
            await calls.rewards(0, of(how))
        except RewardError:
            # Its worker is gone, and another goes on: what the first one left must not pile up until the run's end.
            await settled(lambda: not lives(int((folder / "tried").read_text())))

    run(reward("orphan", timeoutSeconds=20), folder, work)
    wait_for("its end", lambda: not lives(int((folder / "tried").read_text())), PATIENCE)


@pytest.mark.slow
def test_a_worker_ends_whose_exit_is_known_before_its_last_word_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(calls: Calls, workers: Workers) -> str:
        (worker,) = workers._all
        stdout = worker._process.answers
        assert stdout is not None
        read = stdout.readline

        async def late() -> bytes:
            line = await read()
            await settled(lambda: worker._process.exit_code is not None)
            return line

        monkeypatch.setattr(stdout, "readline", late)
        with pytest.raises(RewardError) as error:
            await calls.rewards(0, of("dies"))
        return str(error.value)

    assert "ended its worker process with exit code 7" in run(reward("orphan", timeoutSeconds=20), folder, work)
    wait_for("its end", lambda: not lives(int((folder / "tried").read_text())), PATIENCE)


@pytest.mark.slow
def test_a_progress_bar_is_not_kept_without_end(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work(calls: Calls, workers: Workers) -> tuple[int, str]:
        asked = asyncio.create_task(calls.rewards(0, of("a")))
        (worker,) = workers._all
        await settled(lambda: bool(worker._said) and worker._said[-1].endswith("." * 4000))
        kept = sum(map(len, worker._said))
        with pytest.raises(RewardError) as error:
            await asked
        return kept, str(error.value)

    kept, says = run(reward("bar", timeoutSeconds=20), folder, work)
    assert kept < 100_000
    assert f"mine.py:{line('bar') + 6} in bar" in says, "the frames are still found behind it"
    assert "59999/60000" in capfd.readouterr().err


def test_a_function_may_use_up_its_arguments(folder: Path) -> None:
    call = of("a", "bbb", gold=[["x"], ["y"]])

    async def work(calls: Calls, _: Workers) -> Any:
        return (await calls.rewards(0, call)).rewards

    def takes(prompts: list[str], responses: list[str], gold: list[list[str]]) -> list[float]:
        gold[0].append("seen")
        prompts.clear()
        return [float(len(responses.pop(0))) for _ in range(2)]

    assert run(reward("takes"), folder, work) == [1.0, 3.0]
    assert live(takes, call) == [1.0, 3.0]
    assert call == of("a", "bbb", gold=[["x"], ["y"]]), "another try gets the same"


def test_what_comes_from_outside_is_tried_again_on_a_fresh_worker(folder: Path) -> None:
    slept: list[float] = []
    said: list[dict[str, Any]] = []

    async def work(calls: Calls, _: Workers) -> Any:
        before = (await calls.rewards(1, of("a"))).rewards
        flaky = (await calls.rewards(0, of("a"))).rewards
        return before, flaky, (await calls.rewards(1, of("a"))).rewards

    def log(event: str, **fields: Any) -> None:
        said.append({"event": event, **fields})

    before, flaky, after = run(reward("flaky", "pid"), folder, work, retries=3, slept=slept, log=log)
    assert flaky == [2.0]
    assert before != after, "not the process in which it failed"
    assert slept == [1.0, 2.0]
    assert [s["event"] for s in said] == ["reward.failed"] * 2
    assert "raised ConnectionError: judge.example: connection refused" in said[0]["reason"]
    assert said[1]["again_in"] == 2.0


def test_tries_end_and_are_counted_and_nonsense_is_not_tried_again(folder: Path) -> None:
    slept: list[float] = []

    async def work(calls: Calls, _: Workers) -> list[str]:
        said = []
        for number in (0, 1):
            with pytest.raises(RewardError) as error:
                await calls.rewards(number, of("a", "b"))
            said.append(str(error.value))
        return said

    died, nonsense = run(reward("dies", "nan"), folder, work, retries=2, slept=slept)
    assert "exit code 7, 3 times in a row, on prompt 2" in died
    assert "times in a row" not in nonsense
    assert slept == [1.0, 2.0]


def test_a_rehearsal_tries_again_only_what_failed_outside(folder: Path) -> None:
    slept: list[float] = []

    async def work(calls: Calls, _: Workers) -> Any:
        with pytest.raises(RewardError, match=r"KeyError: 'score', on prompt 2 of iteration 4 \(a rehearsal"):
            await calls.rewards(0, of("a"), rehearsal=True)
        return (await calls.rewards(1, of("a"), rehearsal=True)).rewards

    assert run(reward("key_error", "flaky"), folder, work, retries=5, slept=slept) == [2.0]
    assert slept == [1.0, 2.0]


def test_what_functions_may_be_and_return(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work(calls: Calls, _: Workers) -> Any:
        needs = {f.title: f.needs for f in calls.functions}
        return needs, [(await calls.rewards(i, of("a", "bb", gold=["a", "a"]))).rewards for i in range(5)]

    needs, given = run(reward("good", "patient", "arrays", "talks", "gold"), folder, work)
    third = float(np.float32(1) / np.float32(3))
    assert given == [[1.0, 2.0], [2.0, 2.0], [0.0, third], [1.0, 1.0], [1.0, 0.0]]
    assert needs == dict.fromkeys(["good", "patient", "arrays", "talks"], "Group") | {"gold": "Sample"}
    said = capfd.readouterr().err
    assert "a word on stdout" in said, "to the coordinator's log"
    assert "another" in said


def test_what_a_function_prints_fails_no_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the locale is not UTF-8: a model may write anything."""

    async def work(calls: Calls, _: Workers) -> Any:
        return (await calls.rewards(0, of("\u4f60\u597d"))).rewards

    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert run(reward("accents"), folder, work) == [1.0]
    assert "\u4f60\u597d\nhalf \\ud83d\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "name", "says"),
    [
        ("", "mine:missing", "module 'mine' has no 'missing'"),
        ("", "other:f", "cannot import 'other'"),
        ("", "mine:not_a_function", "is not callable"),
        ("def f(:\n", "broken:f", "importing 'broken:f' raised SyntaxError"),
        ("1 / 0\n", "broken:f", "raised ZeroDivisionError: division by zero; last frames: "),
        ("import sys; sys.exit()\n", "broken:f", "raised SystemExit"),
        ("import os; os._exit(1)\n", "broken:f", "importing the reward functions ended its worker process"),
        ("def f(): ...\nf.needs = 'All'\n", "broken:f", "its attribute `needs` is 'All'; write 'Sample' or 'Group'"),
    ],
)
def test_what_cannot_be_imported_is_named(folder: Path, code: str, name: str, says: str) -> None:
    (folder / "broken.py").write_text(code)

    async def work(calls: Calls, _: Workers) -> None:
        pytest.fail("found")

    with pytest.raises(RewardError) as error:
        run(RewardModel(function=name), folder, work)
    assert str(error.value).startswith("spec.models.reward.function: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_modules_come_from_the_import_path_and_not_from_the_current_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path_factory.mktemp("here")
    (here / "mine.py").write_text("def good(prompts, responses, **fields): return [-1.0]\n")
    (here / "json.py").write_text("raise SystemExit('taken from the current folder')\n")
    monkeypatch.chdir(here)

    async def work(calls: Calls, _: Workers) -> Any:
        return (await calls.rewards(0, of("abc"))).rewards

    assert run(reward("good", importPath=str(folder)), here, work) == [3.0]


def test_a_worker_that_is_killed_while_idle_is_replaced(folder: Path) -> None:
    async def work(calls: Calls, _: Workers) -> tuple[float, float]:
        (first,) = (await calls.rewards(0, of("a"))).rewards
        os.kill(int(first), signal.SIGKILL)
        (second,) = (await calls.rewards(0, of("a"))).rewards
        return first, second

    first, second = run(reward("pid"), folder, work, retries=1)
    assert first != second


ORPHAN = """
import asyncio, os, pathlib, sys
from dovetail.manifest.types import RewardModel
from dovetail.coordinator.rewards.calls import Call
from dovetail.coordinator.rewards.workers import Workers

async def main():
    model = RewardModel(functions=[{"function": "mine:pid"}, {"function": "mine:hangs"}])
    workers = Workers(model, pathlib.Path(sys.argv[1]))
    await workers.open()
    (pid,) = (await workers.call(0, Call(1, 0, ["p"], ["r"]))).rewards
    print(int(pid), flush=True)
    await workers.call(1, Call(1, 0, ["p"], ["r"]))

asyncio.run(main())
"""


def test_a_worker_that_hangs_dies_with_its_coordinator(folder: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        worker = psutil.Process(int(coordinator.stdout.readline()))
        coordinator.kill()
    worker.wait(PATIENCE)


def test_workers_serve_a_loop_of_another_thread(folder: Path) -> None:
    """As the Python API's."""
    found = []

    async def work(calls: Calls, _: Workers) -> Any:
        return (await calls.rewards(0, of("abc"))).rewards

    thread = threading.Thread(target=lambda: found.append(run(reward("good"), folder, work)))
    thread.start()
    thread.join(PATIENCE)
    assert found == [[3.0]]


# ---------------------------------------------------------------- before training


def tiny(folder: Path, name: str) -> RLHFJob:
    return tiny_job(
        stages=["sft", "ppo"],
        models={
            "actor": tiny_job().spec.models.actor.model_dump(by_alias=True, exclude_none=True),
            "reward": {"function": f"mine:{name}", "importPath": str(folder)},
        },
    )


def test_a_broken_function_fails_the_job_before_anything_is_trained(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator's own main, without a trainer or a rollout."""
    job = tiny(folder, "key_error")
    (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True))
    (tmp_path / "plan.json").write_text(make_plan(job.spec).model_dump_json(by_alias=True))
    url = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}"
    env = ProcessEnv("tiny", "coordinator", tmp_path, url, "secret", "127.0.0.1", port, 0, "", 0, 1)
    for key, value in env.write().items():
        monkeypatch.setenv(key, value)
    assert coordinator_main.main([]) == JOB_FAILED
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["state"] == "failed"
    assert found["reason"] == (
        f"reward function key_error ({folder}/mine.py:{line('key_error')}) raised KeyError: 'score', on prompt 0 of "
        f"iteration 1 (a rehearsal, before training); last frames: {folder}/mine.py:9 in key_error"
    )
    (failed,) = [e for e in map(json.loads, (tmp_path / "events.jsonl").open()) if e["event"] == "job.failed"]
    assert failed["reason"] == found["reason"]


def rehearsed(folder: Path, name: str, run_dir: Path, **more: Any) -> None:
    """The rehearsal of a function on the prompts in mine.jsonl."""
    job = tiny(folder, name).model_dump(mode="json", by_alias=True, exclude_none=True)
    job["spec"]["data"] |= {"prompts": [{"path": "mine.jsonl"}], "heldOut": 0}
    spec = RLHFJob.model_validate(job | {"spec": job["spec"] | more}).spec
    prepared = prepare(spec, run_dir, folder)

    async def start() -> None:
        calls = Calls(Workers(spec.models.reward, folder), 0, lambda *_, **__: None)
        try:
            await rehearse(calls, prepared)
        finally:
            await calls.close()

    asyncio.run(start())


def test_a_field_with_the_name_of_an_argument_is_refused(folder: Path) -> None:
    (folder / "mine.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "responses": ["c"]}\n')
    with pytest.raises(
        RewardError, match=r"^spec.data.prompts: a record has the field 'responses', .*; rename the field$"
    ):
        rehearsed(folder, "good", folder / "run")


def test_a_function_that_names_its_arguments_gets_no_fields_of_evaluations(folder: Path) -> None:
    (folder / "mine.py").write_text("def named(prompts, responses, answer):\n    return [1.0] * len(responses)\n")
    (folder / "mine.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "answer": "c"}\n')
    (folder / "exam.jsonl").write_text('{"prompt": "d", "answer": "e", "level": 3}\n')
    exam = {"prompts": [{"path": "exam.jsonl"}], "metrics": ["exactMatch"]}
    rehearsed(folder, "named", folder / "run", evaluation=exam)


def test_a_function_of_episodes_gets_them_one_by_one(folder: Path) -> None:
    """A prompt's episodes may be discarded, so a function that waits for all of them would wait for ever."""
    code = "def of_episode(prompts, responses, messages, earned, ending, **_):\n    assert messages[0][-1]['content']\n"
    code += "    return [float(x) for x in earned]\n"
    (folder / "mine.py").write_text(code)
    (folder / "mine.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    sessions = {"environment": {"function": "m:C"}}
    with pytest.raises(RewardError, match=r'some of its episodes may be discarded; write of_episode.needs = "Sample"'):
        rehearsed(folder, "of_episode", folder / "run", sessions=sessions)
    (folder / "mine.py").write_text(code + "of_episode.needs = 'Sample'\n")
    rehearsed(folder, "of_episode", folder / "run", sessions=sessions)


def test_a_rehearsal_is_on_two_of_the_job_s_prompts_and_once_a_run(tmp_path: Path) -> None:
    calls: list[tuple[list[str], list[str]]] = []

    def mine(prompts: list[str], responses: list[str], **fields: Any) -> list[float]:
        calls.append((prompts, responses))
        return [0.0] * len(responses)

    spec = tiny(tmp_path, "unused").spec

    async def start() -> list[str]:
        settings = CoordinatorSettings(
            tmp_path, "secret", "127.0.0.1", free_port("127.0.0.1"), tmp_path, reward_function=mine
        )
        async with Engines(spec, make_plan(spec), settings, lambda *_, **__: None) as engines:
            await engines.check_rewards()
            return [record.text for record in engines.prepared.prompts(1)]

    texts = asyncio.run(start())
    assert [prompts for prompts, _ in calls] == [[text] for text in texts[:2]]
    assert all(response for _, (response,) in calls)
    asyncio.run(start())
    assert len(calls) == 2, "not again when the coordinator comes back"


@pytest.mark.slow
def test_a_function_whose_file_changes_during_a_run_is_told(tmp_path: Path) -> None:
    """As when somebody edits the ConfigMap of a job that runs: a process that is started again reads the new file, and
    rewards of two functions would be in one run without a trace."""
    file = tmp_path / "mine.py"
    told: list[dict[str, Any]] = []
    text = "def score(prompts, responses, **fields):\n    return [1.0] * len(responses)\n"
    file.write_text(text)
    spec = tiny(tmp_path, "score").spec

    async def start() -> None:
        settings = CoordinatorSettings(tmp_path, "secret", "127.0.0.1", free_port("127.0.0.1"), tmp_path)

        def log(event: str, **fields: Any) -> None:
            if event == "reward.changed":
                told.append(fields)

        async with Engines(spec, make_plan(spec), settings, log) as engines:
            assert engines._rewards is not None
            await engines._rewards.open()

    asyncio.run(start())
    asyncio.run(start())
    assert told == []
    file.write_text(text.replace("1.0", "2.0"))
    asyncio.run(start())
    asyncio.run(start())
    assert told == [{"function": "mine:score", "file": str(file)}]


RAW = """\
def open_ended(prompts, responses, *, raw, **fields):
    assert "raw" not in fields
    return [float(r.endswith("<end>")) for r in raw]
def closed(prompts, responses, raw):
    return [float(len(r)) for r in raw]
def takes_all(prompts, responses, **fields):
    return [float("raw" in fields)] * len(responses)
def takes_none(prompts, responses):
    return [0.5] * len(responses)
"""


@pytest.mark.slow
def test_a_function_with_a_parameter_raw_gets_the_end_tokens_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RAW)
    call = Call(1, 0, ["p", "p"], ["a", "b"], raw=["a<end>", "b"])

    async def all_of_them(calls: Calls, _: Workers) -> list[list[float]]:
        return [(await calls.rewards(number, call)).rewards for number in range(4)]

    names = ("open_ended", "closed", "takes_all", "takes_none")
    there = run(reward(*names), tmp_path, all_of_them)
    assert there == [[1.0, 0.0], [6.0, 1.0], [0.0, 0.0], [0.5, 0.5]]
    scope: dict[str, Any] = {}
    exec(RAW, scope)
    assert [live(scope[name], call) for name in names] == there
    field = Call(1, 0, ["p"], ["a"], {"raw": ["of the record"]}, raw=["a<end>"])
    assert live(scope["takes_all"], field) == [1.0], "a field of that name, where no function asks for the response"
    with pytest.raises(
        RewardError, match=r"a record has the field 'raw', but reward function open_ended gets the raw of"
    ):
        live(scope["open_ended"], field)


# ---------------------------------------------------------------- in this process


def live(function: Callable[..., Any], call: Call, seconds: float = 60.0) -> Any:
    async def main() -> Any:
        calls = Calls(LiveFunction(function, seconds), 0, lambda *_, **__: None)
        await calls.open()
        return (await calls.rewards(0, call)).rewards

    return asyncio.run(main())


def test_a_function_of_the_python_api_has_the_same_sentences() -> None:
    seen = []

    def closure(prompts: list[str], responses: list[str], **fields: Any) -> Any:
        seen.append(fields)
        return fields["make"][0](responses)

    def quits(responses: list[str]) -> None:
        raise SystemExit("enough")

    async def coroutine(prompts: list[str], responses: list[str], **fields: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.5] * len(responses)

    def stops(responses: list[str]) -> Any:
        return next(iter(()))

    assert live(closure, of("a", make=[lambda r: [7]])) == [7.0]
    assert live(coroutine, of("a", "b")) == [1.5, 1.5]
    for make, says in (
        (lambda r: [float("inf")], r"returned inf for response 0"),
        (lambda r: [1, 2], r"returned 2 rewards for 1 responses"),
        (quits, r"raised SystemExit: enough.*; last frames: .* in quits"),
        (stops, r"raised StopIteration, on prompt 2"),
    ):
        with pytest.raises(RewardError, match=rf"^reward function closure \({__file__}:\d+\) {says}"):
            live(closure, of("a", make=[make]))
    assert len(seen) == 5


@pytest.mark.slow
def test_a_function_of_the_python_api_has_a_deadline() -> None:
    forever = threading.Event()

    def stuck(prompts: list[str], responses: list[str], **fields: Any) -> list[float]:
        forever.wait()
        return []

    async def sleeps(prompts: list[str], responses: list[str], **fields: Any) -> list[float]:
        await asyncio.sleep(3600)
        return []

    try:
        with pytest.raises(RewardError, match=r"gave no answer within 0.5 s .*; last frames: .*in stuck"):
            live(stuck, of("a"), 0.5)
    finally:
        forever.set()
    with pytest.raises(RewardError, match=r"gave no answer within 0.5 s"):
        live(sleeps, of("a"), 0.5)


# ---------------------------------------------------------------- one iteration

PROMPTS, PER_PROMPT = 3, 2
FIELDS: list[dict[str, Any]] = [{"gold": "1"}, {}, {"gold": "21"}]


class Asked:
    """A caller that answers when it is told to, and remembers what it was asked."""

    def __init__(self, functions: list[tuple[str, float, str]]) -> None:
        self._functions = [Function(title, weight, "x.py:1", needs) for title, weight, needs in functions]  # type: ignore[arg-type]
        self.calls: list[tuple[int, Call]] = []
        self.go = asyncio.Event()

    async def open(self) -> Any:
        return self._functions

    async def call(self, function: int, call: Call) -> Any:
        self.calls.append((function, call))
        await self.go.wait()
        return RewardAnswer([(function + 1) * float(r) for r in call.responses], 0.0, 1.0)

    async def close(self) -> None: ...


@contextmanager
def iteration(tmp_path: Path) -> Iterator[Store]:
    """A store with every sample generated: sample s of prompt p answered p and s as digits."""
    store = Store(tmp_path)
    try:
        new = [NewSample(p, s, [5], 0, {}) for p in range(PROMPTS) for s in range(PER_PROMPT)]
        if store.samples.begin_iteration(1, new):
            for n in new:
                key = Key(1, n.prompt, n.sample)
                (attempt,) = store.samples.assign([Assignment(key, "r", "i", 1, 0)])
                delta = Delta(key, attempt, 0, [n.prompt, n.sample], [0.0, 0.0], "stop")
                assert store.samples.record([delta]) == [True]
        yield store
    finally:
        store.close()


def finished(store: Store, *keys: tuple[int, int]) -> list[Finished]:
    return [Finished(s.key, s.prompt_tokens, s.tokens) for s in (store.samples.get(Key(1, *key)) for key in keys)]


def rewards_of(store: Store, calls: Calls, joined: Joined) -> Rewards:
    records = [PromptRecord(i, f"prompt {i}", [5], fields) for i, fields in enumerate(FIELDS)]

    async def text(sample: Finished) -> ResponseText:
        said = "".join(str(t) for t in sample.response)
        return ResponseText(said, f"{said}<end>")

    return Rewards(
        RewardFunctions(calls, store.samples, text),
        1,
        records,
        PER_PROMPT,
        joined.rewards,
    )


def scores(*keys: tuple[int, int]) -> list[Scores]:
    return [Scores(Key(1, *key), np.zeros(2, np.float32), None, None) for key in keys]


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_the_scores_of_a_call_are_stored_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[list[Key]] = []

    async def main(store: Store) -> None:
        score = store.samples.score

        def noted(rows: Iterable[ScoreRow]) -> int:
            rows = list(rows)
            stored.append([row.key for row in rows])
            return score(rows)

        monkeypatch.setattr(store.samples, "score", noted)
        caller = Asked([("all", 1.0, "Group")])
        caller.go.set()
        calls = Calls(caller, 0, lambda *_, **__: None)
        await calls.open()
        joined = Joined(store.samples, critic_version=0)
        joined.scores(scores(*ALL))
        async with rewards_of(store, calls, joined) as rewards:
            rewards.add(finished(store, *ALL))
            await rewards.finish()

    with iteration(tmp_path) as store:
        asyncio.run(main(store))
    assert sorted(stored) == [[Key(1, p, s) for s in range(PER_PROMPT)] for p in range(PROMPTS)]


TWO = [("each", 1.0, "Sample"), ("all", 0.5, "Group")]
ALL = [(p, s) for p in range(PROMPTS) for s in range(PER_PROMPT)]


def test_functions_are_called_while_others_generate_and_both_halves_make_a_score(tmp_path: Path) -> None:
    async def main(store: Store) -> None:
        caller = Asked(TWO)
        calls = Calls(caller, 0, lambda *_, **__: None)
        await calls.open()
        joined = Joined(store.samples, critic_version=0)
        async with rewards_of(store, calls, joined) as rewards:
            rewards.add(finished(store, (1, 1)))
            await settled(lambda: len(caller.calls) == 1)
            (number, call), *_ = caller.calls
            assert (number, call.prompt, call.sample, call.responses) == (0, 1, 1, ["11"]), "alone, at once"
            assert call.raw == ["11<end>"]
            assert call.fields == {"gold": [None]}, "a field that another record of the iteration has"
            rewards.add(finished(store, (1, 0)))
            await settled(lambda: len(caller.calls) == 3)
            number, call = caller.calls[2]
            assert (number, call.sample, call.responses) == (1, None, ["10", "11"]), "the group, in order"
            caller.go.set()
            await settled(lambda: len(store.samples.rewards(1)) == 2)
            assert store.samples.samples(1, State.SCORED) == [], "no scorer has answered yet"
            joined.scores(scores((1, 0), (1, 1), (0, 0)))
            done = store.samples.samples(1, State.SCORED)
            assert [(s.key.prompt, s.key.sample, s.reward) for s in done] == [(1, 0, 20.0), (1, 1, 22.0)]
            rewards.add(finished(store, (0, 0), (0, 1), (2, 0), (2, 1)))
            joined.scores(scores((0, 1), (2, 0), (2, 1)))
            await rewards.finish()
            rewards.check()
        assert [s.reward for s in store.samples.experience(1)] == [0.0, 2.0, 20.0, 22.0, 40.0, 42.0]
        assert store.samples.rewards(1)[Key(1, 2, 1)] == {"each": 21.0, "all": 42.0}

    with iteration(tmp_path) as store:
        asyncio.run(main(store))


def test_a_coordinator_that_comes_back_asks_only_for_what_is_not_stored(tmp_path: Path) -> None:
    async def first(store: Store) -> None:
        caller = Asked(TWO)
        calls = Calls(caller, 0, lambda *_, **__: None)
        await calls.open()
        async with rewards_of(store, calls, Joined(store.samples, 0)) as rewards:
            caller.go.set()
            rewards.add(finished(store, (0, 0), (0, 1), (1, 0)))
            await settled(lambda: len(store.samples.rewards(1)) == 3)
            await settled(lambda: len(store.samples.rewards(1)[Key(1, 0, 0)]) == 2)

    async def second(store: Store) -> list[tuple[int, int, list[str]]]:
        caller = Asked(TWO)
        calls = Calls(caller, 0, lambda *_, **__: None)
        await calls.open()
        caller.go.set()
        joined = Joined(store.samples, 0)
        async with rewards_of(store, calls, joined) as rewards:
            rewards.add(finished(store, *ALL))
            joined.scores(scores(*ALL))
            await rewards.finish()
        return sorted((number, call.prompt, call.responses) for number, call in caller.calls)

    with iteration(tmp_path) as store:
        asyncio.run(first(store))
    with iteration(tmp_path) as store:
        asked = asyncio.run(second(store))
        again = [s.reward for s in store.samples.experience(1)]
    assert asked == [
        (0, 1, ["11"]),
        (0, 2, ["20"]),
        (0, 2, ["21"]),
        (1, 1, ["10", "11"]),
        (1, 2, ["20", "21"]),
    ]
    assert again == [0.0, 2.0, 20.0, 22.0, 40.0, 42.0], "the same as without an interruption"


def test_workers_and_order_do_not_change_what_is_stored(folder: Path, tmp_path: Path) -> None:
    """Real workers: one and three, samples finishing forwards and backwards."""
    found = []
    for workers, order in ((1, ALL), (3, ALL[::-1])):

        async def main(store: Store, order: list[tuple[int, int]], workers: int) -> list[float | None]:
            pool = Workers(reward("arrays", "good", workers=workers), folder)
            calls = Calls(pool, 0, lambda *_, **__: None)
            try:
                await calls.open()
                joined = Joined(store.samples, 0)
                async with rewards_of(store, calls, joined) as rewards:
                    for key in order:
                        rewards.add(finished(store, key))
                        joined.scores(scores(key))
                    await rewards.finish()
            finally:
                await calls.close()
            return [s.reward for s in store.samples.experience(1)]

        with iteration(tmp_path / str(workers)) as store:
            found.append(asyncio.run(main(store, order, workers)))
    third = float(np.float32(1) / np.float32(3))
    assert found[0] == found[1] == [2.0, third + 2.0] * PROMPTS


def test_a_function_that_fails_ends_the_iteration(tmp_path: Path, folder: Path) -> None:
    async def main(store: Store) -> None:
        pool = Workers(reward("key_error"), folder)
        calls = Calls(pool, 0, lambda *_, **__: None)
        try:
            await calls.open()
            async with rewards_of(store, calls, Joined(store.samples, 0)) as rewards:
                rewards.add(finished(store, *ALL))
                with pytest.raises(RewardError, match="KeyError: 'score'"):
                    await rewards.finish()
                rewards.add(())
                with pytest.raises(RewardError, match="KeyError: 'score'"):
                    rewards.check()
        finally:
            await calls.close()

    with iteration(tmp_path / "run") as store:
        asyncio.run(main(store))
