"""`dovetail audit`: what was trained, whatever happened, and which prompts other trainers' dumps lack."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dovetail.cli.main import cli
from dovetail.coordinator.data.prepare import Prepared, prepare
from dovetail.coordinator.loop.experience_maker import IterationPrompts
from dovetail.coordinator.store.episodes import EndedEpisode, Transcript
from dovetail.coordinator.store.experience_files import ExperienceFiles, episode_arrays, experience_arrays
from dovetail.coordinator.store.samples import Assignment, Delta, Key, NewSample, ScoreRow, State
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.store.tool_calls import CallKey
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.wire import BRANCH, LEARNT, SampleArrays
from helpers.jobs import tiny_job
from helpers.lazy import Lazy

pyarrow, parquet = Lazy("pyarrow"), Lazy("pyarrow.parquet")

EACH, PROMPTS, ITERATIONS = 2, 4, 3


class Loop:
    """What a job does with its store, without its processes: draws, scores, trains and forgets. All samples of a
    prompt whose position is in `easy` get the same reward in the first round."""

    def __init__(self, folder: Path, easy: tuple[int, ...] = (), **spec: object) -> None:
        ppo = {
            "iterations": ITERATIONS,
            "advantage": "grpo",
            "samplesPerPrompt": EACH,
            "globalBatchSize": EACH * PROMPTS,
            "dynamicSampling": 1,
        }
        job = tiny_job(stages=["ppo"], **{"ppo": ppo, **spec})
        self.job: RLHFJob = job
        self.folder, self.easy = folder, easy
        (folder / "job.json").write_text(job.model_dump_json(by_alias=True))
        self.prepared: Prepared = prepare(job.spec, folder, folder)
        self.store, self.files = Store(folder), ExperienceFiles(folder)

    def draw(self, iteration: int) -> None:
        def samples(position: int, record: object) -> list[NewSample]:
            tokens = prompts.records[position].token_ids
            return [NewSample(position, s, tokens, 10 * position + s) for s in range(EACH)]

        prompts = IterationPrompts(
            iteration,
            self.prepared.prompts(iteration),
            self.store,
            samples,
            1,
            lambda number, count, known: self.prepared.further_prompts(iteration, number, count, known),
        )
        self.store.samples.begin_iteration(iteration, prompts.samples())
        while True:
            for sample in self.store.samples.samples(iteration, State.PENDING):
                key, length = sample.key, 1 + sample.key.prompt
                (attempt,) = self.store.samples.assign([Assignment(key, "r", "i", 0, 0)])
                self.store.samples.record([Delta(key, attempt, 0, [1] * length, [0.0] * length, "stop")])
                reward = 1.0 if key.prompt in self.easy else float(key.sample)
                self.store.samples.score([ScoreRow(key, np.zeros(length, np.float32), None, reward)])
            if not prompts.replace_equal():
                return

    def train(self, iteration: int) -> None:
        arrays = self.arrays(iteration)
        digest = self.files.write(iteration, arrays)
        told = {f"ppo/{iteration}/facts": {}, f"ppo/{iteration}/batch": digest}
        self.store.put_trained(iteration, self.store.outcome_of(iteration, arrays), told)

    def arrays(self, iteration: int) -> SampleArrays:
        return experience_arrays(self.store.samples.experience(iteration), 0)

    def finish(self, iteration: int) -> None:
        for state in (State.IN_BATCH, State.TRAINED):
            self.store.samples.advance(iteration, state)
        self.store.put("ppo/progress", {"step": iteration})
        self.store.samples.forget_before(iteration)

    def run(self) -> None:
        for iteration in range(1, ITERATIONS + 1):
            self.draw(iteration)
            self.train(iteration)
            self.finish(iteration)

    def change(self, sql: str) -> None:
        with self.store._db.transaction() as db:
            db.execute(sql)


AGENT = Path(__file__).parents[3] / "examples" / "agent"
# What the episodes of each iteration fail by, by prompt and sample. The prompt 1 has one left, and 2 has none.
FAILED = {(0, 1): "wrong call", (1, 0): "wrong call", (1, 2): "environment failed"} | {(2, s): "cut" for s in range(3)}


class AgentLoop(Loop):
    """The same with episodes: three of each prompt, each with one call. Those of the last prompt have two branches."""

    def __init__(self, folder: Path) -> None:
        runpy.run_path(str(AGENT / "make.py"))["write_task"](folder)
        super().__init__(
            folder,
            models={
                "actor": {"source": {"scratch": {"architecture": "llama", "config": {"hidden_size": 16}}}},
                "tokenizer": {"path": str(folder / "tokenizer")},
                "reward": {"function": "boxes:right", "importPath": str(AGENT)},
            },
            data={"prompts": [{"path": str(folder / "prompts.jsonl")}], "demonstrations": [], "preferences": []},
            sessions={"environment": {"function": "boxes:Boxes"}, "onFailure": "Discard"},
            ppo={"iterations": ITERATIONS, "advantage": "grpo", "samplesPerPrompt": 3, "globalBatchSize": 3 * PROMPTS},
        )

    def draw(self, iteration: int) -> None:
        samples = [
            NewSample(record.index, s, record.token_ids, s, record.fields)
            for record in self.prepared.prompts(iteration)
            for s in range(3)
        ]
        self.store.samples.begin_iteration(iteration, samples)
        for sample in samples:
            key = Key(iteration, sample.prompt, sample.sample)
            call = CallKey(*key, 0, 0, 0)
            self.store.tool_calls.intend(call, "open", {})
            if ending := FAILED.get(key[1:]):
                self.store.episodes.discard(key, ending, "it failed", Transcript([], 0, 0))
                continue
            self.store.tool_calls.observe(call, "a coin")
            learnt = np.array([LEARNT, 0, BRANCH if key.prompt == PROMPTS - 1 else 0, LEARNT], np.uint8)
            prompt, said = [9, *sample.prompt_tokens, 9], [1, 2, 3, 4]  # with the tools, and what the environment says
            told = (True, "answered", "", None, [], 2, 1)
            self.store.episodes.end(key, EndedEpisode(prompt, said, [0.0] * 4, learnt, *told))
            self.store.samples.score([ScoreRow(key, np.zeros(4, np.float32), None, float(key.sample))])

    def arrays(self, iteration: int) -> SampleArrays:
        samples = self.store.samples.experience(iteration)
        episodes = episode_arrays(samples, self.store.episodes.of(iteration), compares=True)
        return SampleArrays({**super().arrays(iteration), **episodes}, {})


def ask(*words: object) -> Result:
    return CliRunner().invoke(cli, ["audit", *map(str, words)])


@pytest.mark.slow
def test_each_prompt_was_trained_as_the_manifest_says(tmp_path: Path) -> None:
    loop = Loop(tmp_path, easy=(1, 2))
    loop.run()
    found = ask(tmp_path)  # while the coordinator has the store open
    assert found.exit_code == 0, found.output
    assert "Each prompt was trained exactly as the manifest says: iterations 1 to 3 trained 24 samples" in found.output
    rows = [json.loads(line) for line in ask(tmp_path, "--json").output.splitlines()]
    trained, drawn = (sum(row["samples"].get(name, 0) for row in rows) for name in ("trained", "drawn"))
    assert (trained, drawn) == (24, 36), "two prompts of each iteration were replaced"
    for iteration in range(1, ITERATIONS + 1):
        texts = {record.text for record in loop.prepared.prompts(iteration)}
        assert len(texts & {row["prompt"] for row in rows}) == len(texts)
    loop.store.close()


def other_text(loop: Loop) -> None:
    arrays = experience_arrays(loop.store.samples.experience(ITERATIONS), 0)
    outcome = loop.store.outcome_of(ITERATIONS, arrays)
    outcome.parts[0].rows["text"][0] += 1
    loop.change(f"DELETE FROM outcomes WHERE iteration={ITERATIONS} AND outcome='trained'")
    loop.store.put_trained(ITERATIONS, outcome, {})


def lost_sample(loop: Loop) -> None:
    arrays = experience_arrays(loop.store.samples.experience(ITERATIONS)[1:], 0)
    loop.change(f"DELETE FROM outcomes WHERE iteration={ITERATIONS} AND outcome='trained'")
    loop.store.put_trained(ITERATIONS, loop.store.outcome_of(ITERATIONS, arrays), {})


def other_batch(loop: Loop) -> None:
    arrays = experience_arrays(loop.store.samples.experience(ITERATIONS), 0)
    arrays["scores"] = arrays["scores"] + 1
    loop.store.put(f"ppo/{ITERATIONS}/batch", loop.files.write(ITERATIONS, arrays))


WRONG: dict[str, tuple[Callable[[Loop], object], str]] = {
    "an iteration without a record": (
        lambda loop: loop.change("DELETE FROM outcomes WHERE iteration=2 AND outcome='trained'"),
        "iteration 2 has no record of what it trained",
    ),
    "an iteration twice": (
        lambda loop: loop.change("INSERT INTO outcomes SELECT * FROM outcomes WHERE iteration=1"),
        "iteration 1 was trained 2 times",
    ),
    "a sample that was lost": (lost_sample, "iteration 3, prompt 0: 1 of 2 samples were trained"),
    "another prompt": (other_text, "iteration 3, prompt 0: another prompt was trained than the data has there"),
    "another batch": (other_batch, "iteration 3: the stored batch has other samples than the record"),
    "a replaced prompt without a record": (
        lambda loop: loop.change("DELETE FROM outcomes WHERE iteration=2 AND outcome='equal_rewards'"),
        "iteration 2, prompt 1: replaced, but its 2 samples have no record",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_was_not_trained_as_the_manifest_says_is_named(tmp_path: Path, case: str) -> None:
    break_it, sentence = WRONG[case]
    loop = Loop(tmp_path, easy=(1,))
    loop.run()
    break_it(loop)
    loop.store.close()
    found = ask(tmp_path)
    assert found.exit_code == 1, found.output
    assert sentence in found.output


@pytest.mark.slow
def test_each_episode_was_trained_or_discarded_with_a_cause(tmp_path: Path) -> None:
    loop = AgentLoop(tmp_path)
    loop.run()
    loop.store.close()
    found = ask(tmp_path)
    assert found.exit_code == 0, found.output
    told = " ".join(found.output.split())
    assert "Each prompt was trained exactly as the manifest says: iterations 1 to 3 trained 15 episodes of" in told
    assert "Episodes: 24 branches; 36 calls of tools, 18 of them without an answer; 9 discarded (cut); " in told
    assert "3 discarded (environment failed); 6 discarded (wrong call); 3 with no other to compare with." in told
    rows = [json.loads(line) for line in ask(tmp_path, "--json").output.splitlines()]
    texts = {record.text for number in range(1, ITERATIONS + 1) for record in loop.prepared.prompts(number)}
    assert {row["prompt"] for row in rows} == texts
    kinds = ("drawn", "trained", "alone", "episode_discarded: cut")
    assert [sum(row["samples"].get(kind, 0) for row in rows) for kind in kinds] == [36, 15, 3, 9]


def left_out(loop: AgentLoop) -> None:
    """A loop of one's own leaves an episode out that could be compared with others."""
    arrays = loop.arrays(ITERATIONS)
    arrays["learnt"][-1] = 0
    loop.change(f"DELETE FROM outcomes WHERE iteration={ITERATIONS}")
    loop.store.put_trained(ITERATIONS, loop.store.outcome_of(ITERATIONS, arrays), {})


WRONG_EPISODES: dict[str, tuple[Callable[[AgentLoop], object], str]] = {
    "an episode that is left out": (
        left_out,
        "iteration 3, prompt 3: 2 of the 3 episodes that were not discarded were trained",
    ),
    "discarded ones without a record": (
        lambda loop: loop.change("DELETE FROM outcomes WHERE iteration=2 AND outcome='episode_discarded: wrong call'"),
        "iteration 2, prompt 0: 2 of 3 episodes were trained or discarded",
    ),
    "an earlier release": (
        lambda loop: loop.change("DELETE FROM kv WHERE key='ppo/1/episodes'"),
        "iteration 1 has no record of what it trained; an earlier release may have run it",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG_EPISODES)
def test_episodes_that_were_not_trained_as_the_manifest_says_are_named(tmp_path: Path, case: str) -> None:
    break_it, sentence = WRONG_EPISODES[case]
    loop = AgentLoop(tmp_path)
    loop.run()
    break_it(loop)
    loop.store.close()
    found = ask(tmp_path)
    assert found.exit_code == 1, found.output
    assert sentence in found.output


def test_what_a_resume_draws_again_does_not_count_twice(tmp_path: Path) -> None:
    """The result of an iteration could not be trusted: it is forgotten, drawn and trained again."""
    loop = Loop(tmp_path, easy=(0,))
    loop.draw(1)
    loop.train(1)
    loop.store.forget(1, ["ppo/1/replaced", "ppo/1/facts"])
    loop.run()
    loop.store.close()
    found = ask(tmp_path)
    assert found.exit_code == 0, found.output
    rows = [json.loads(line) for line in ask(tmp_path, "--json").output.splitlines()]
    assert sum(row["samples"].get("trained", 0) for row in rows) == 24
    assert sum(row["samples"].get("discarded", 0) for row in rows) == EACH * (PROMPTS + 1)


def test_the_record_is_compared_where_the_data_is_gone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    loop = Loop(tmp_path / "run")
    loop.run()
    loop.store.close()
    document = json.loads((tmp_path / "run/job.json").read_text())
    document["spec"]["data"]["prompts"] = [{"path": str(tmp_path / "gone.jsonl")}]
    (tmp_path / "run/job.json").write_text(json.dumps(document))
    found = ask(tmp_path / "run")
    assert found.exit_code == 0, found.output
    assert "Only numbers were compared, because the data cannot be read again: " in found.output


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    found = ask(tmp_path)
    assert found.exit_code == 2
    assert "is no run directory" in found.output


# ---------------------------------------------------------------- dumps of other trainers


def verl(folder: Path, steps: dict[int, list[int]]) -> Path:
    """As trainer.rollout_data_dir writes them: a file for each step. Prompt n has a response of 10 n characters."""
    folder.mkdir()
    for step, prompts in steps.items():
        rows = [
            {"input": f"<|im_start|>user\nprompt {n}", "output": "x" * 10 * n, "score": 1.0, "step": step}
            for n in prompts
            for _ in range(2)
        ]
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_resume_that_lost_the_long_prompts(tmp_path: Path) -> None:
    """Step 3 lacks the long ones of step 2, and has one of step 1 again. The undisturbed run went on to step 4."""
    whole = verl(tmp_path / "whole", {1: [1, 2], 2: [3, 90], 3: [80, 4], 4: [5, 6]})
    found = ask(whole, "--against", verl(tmp_path / "resumed", {1: [1, 2], 2: [3], 3: [4, 1]}))
    assert found.exit_code == 1
    assert "2 of 6 prompts (33%) were lost, and 1 repeated. Lost: 850 characters on average. Kept: 25." in found.output
    assert found.output.index("prompt 90") < found.output.index("prompt 80"), "the longest come first"


@pytest.mark.slow  # pyarrow
def test_dumps_of_trl_are_parquet_files_with_conversations(tmp_path: Path) -> None:
    whole = verl(tmp_path / "whole", {1: [1, 2], 2: [3]})
    (tmp_path / "completions").mkdir()
    table = {
        "step": [1, 1, 2],
        "prompt": [[{"role": "user", "content": f"user prompt {n}"}] for n in (1, 2, 3)],
        "completion": ["a", "b", "c"],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "completions/completions_00001.parquet")
    found = ask(whole, "--against", tmp_path / "completions")
    assert found.exit_code == 0, found.output
    assert "0 of 3 prompts (0%) were lost, and 0 repeated." in found.output


def test_a_dump_is_compared_with_the_data_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    loop = Loop(tmp_path / "run")
    loop.run()
    loop.store.close()
    assert loop.prepared.data.prompts is not None
    texts = sorted({record.prompt for record in loop.prepared.data.prompts.training_records()})
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(json.dumps({"query": text, "step": 1}) + "\n" for text in texts[3:]))
    found = ask(tmp_path / "run", "--against", dump, "--json")
    assert found.exit_code == 1
    lost = [json.loads(line) for line in found.output.splitlines() if line.startswith("{")]
    assert sorted(row["prompt"] for row in lost) == texts[:3]


def test_a_dump_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dump.jsonl").write_text('{"text": "hello"}\n')
    found = ask(tmp_path, "--against", tmp_path / "dump.jsonl")
    assert found.exit_code == 2
    assert "has no prompts" in found.output
