"""The model's responses as text: kept by the coordinator, listed by `dovetail samples`, shown while
the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.cli.run import first_record, shown_sample
from dovetail.coordinator.reporting.page.rollout_table import turns
from dovetail.coordinator.reporting.sample_files import (
    BEFORE_SFT,
    SampleFiles,
    evaluation_files,
    files,
    read_rows,
    sample_rows,
)
from dovetail.coordinator.reporting.sample_texts import described, printable, session_lines
from dovetail.coordinator.store.episodes import StoredEpisode, told_of
from dovetail.coordinator.store.samples import Key, Sample, State
from dovetail.protocol.errors import UsageError
from dovetail.protocol.experience import Experience

ESCAPE = "\x1b]0;gotcha\x07"


def row(index: int, reward: float, response: str = "Fine.", iteration: int = 1) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "prompt_index": index,
        "sample_index": 0,
        "prompt": f"Question {index}?",
        "response": response,
        "tokens": 3 + index,
        "finish_reason": "stop",
        "reward": reward,
        "rewards": {"polite": reward},
        "kl": 0.1 * index,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    kept = SampleFiles(tmp_path, 10**6)
    kept.write(1, [row(0, 0.5), row(1, 0.25)])
    kept.write(2, [row(i, reward, f"Answer {reward} <b>{ESCAPE}", 2) for i, reward in enumerate([1.0, 3.0, 2.0])])
    return tmp_path


def samples(run_dir: Path, *arguments: str) -> str:
    done = CliRunner().invoke(cli, ["samples", str(run_dir), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_last_iteration_is_shown_and_a_model_cannot_steer_the_terminal(run_dir: Path) -> None:
    shown = samples(run_dir)
    assert "iteration 2, prompt 1, sample 0: reward 3 (polite 3), KL 0.1, 4 tokens" in shown
    assert "  response: Answer 3.0 <b>" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "3 of 3 samples." in shown


def test_samples_are_sorted_searched_and_limited(run_dir: Path) -> None:
    def rewards(*arguments: str) -> list[float]:
        return [json.loads(line)["reward"] for line in samples(run_dir, "--json", *arguments).splitlines()]

    assert rewards("--sort", "reward") == [3.0, 2.0, 1.0]
    assert rewards("--sort", "reward", "--ascending", "-n", "1") == [1.0]
    assert rewards("-i", "1", "-i", "2") == [0.5, 0.25, 1.0, 3.0, 2.0]
    assert rewards("-i", "2", "--grep", r"Answer [12]") == [1.0, 2.0]
    assert rewards("-i", "2", "--grep", r"Question 1") == [3.0]
    assert "1 of 3 samples. --all shows all." in samples(run_dir, "-n", "1")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-i", "7"], "the samples of iteration 7 are not kept; there are those of iterations 1 to 2"),
        (["-i", "-1"], "iteration -1 stands for the model before SFT; --evaluation shows its answers"),
        (["--ascending"], "--ascending needs --sort"),
        (["--grep", "("], "--grep is not a regular expression"),
    ],
)
def test_a_mistake_gets_one_sentence(run_dir: Path, arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(cli, ["samples", str(run_dir), *arguments])
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_a_run_without_samples_and_a_damaged_file_are_told(run_dir: Path, tmp_path_factory: Any) -> None:
    done = CliRunner().invoke(cli, ["samples", str(tmp_path_factory.mktemp("empty"))])
    assert done.exit_code == 2
    assert "holds no samples" in done.stderr
    files(run_dir)[2].write_text('{"prompt": "cut o')
    done = CliRunner().invoke(cli, ["samples", str(run_dir)])
    assert done.exit_code == 1
    assert "line 1 is not JSON" in done.stderr


def test_the_oldest_iterations_go_first_and_the_newest_stays(tmp_path: Path) -> None:
    size = len(json.dumps(row(0, 1.0))) + 1
    kept = SampleFiles(tmp_path, 2 * size + 10)
    for iteration in (1, 2, 3):
        kept.write(iteration, [row(0, 1.0, iteration=iteration)])
    assert sorted(files(tmp_path)) == [2, 3]
    kept.write(4, [row(0, 1.0, iteration=4)] * 5)
    assert sorted(files(tmp_path)) == [4]
    assert len(read_rows(files(tmp_path)[4])) == 5


def test_a_row_says_what_made_up_the_reward_and_holds_only_json(tmp_path: Path) -> None:
    tokens, logprobs = np.array([5, 6], np.int32), np.array([-1.0, -2.0], np.float32)
    given = [
        Sample(Key(3, p, 0), State.SCORED, tokens, 0, {"answer": "4"}, tokens, logprobs, 2, "v100-0", weight_version=2)
        for p in (0, 1)
    ]
    experience = Experience(
        iteration=3,
        prompts=["2 + 2?", "3 + 3?"],
        responses=["4", "ünsinn\u2028"],
        arrays={
            "scores": np.array([1.5, np.nan], np.float32),
            "response_lengths": np.array([2, 2], np.int32),
            "rollout_logprobs": np.stack([logprobs, logprobs]),
            "ref_logprobs": np.stack([logprobs - 0.5, logprobs]),
        },
        fields=[{"answer": "4"}] * 2,
        raw=["4<end>", "ünsinn\u2028"],
    )
    rows = sample_rows(experience, given, {Key(3, 0, 0): {"right": 1.0, "short": 0.5}}, {})
    SampleFiles(tmp_path, 10**6).write(3, rows)
    first, second = read_rows(files(tmp_path)[3])
    assert first["rewards"] == {"right": 1.0, "short": 0.5}
    assert (first["reward"], first["kl"], first["tokens"]) == (1.5, 1.0, 2)
    assert (first["rollout"], first["assignments"], first["weight_version"]) == ("v100-0", 2, 2)
    assert first["fields"] == {"answer": "4"}
    assert first["response"] == "4<end>", "what the model said, its end token included"
    assert second["reward"] is None
    assert second["response"] == "ünsinn\u2028"


def test_the_answers_of_an_evaluation_are_listed(run_dir: Path) -> None:
    kept, why = SampleFiles(run_dir, 10**6), {"prompt_index": 0, "sample_index": 0, "prompt": "Why?"}
    kept.write_evaluation(0, [{**why, "version": 0, "response": "<script>1</script>", "measures": {"q": 0.25}}])
    kept.write_evaluation(2, [{**why, "version": 2, "response": "Because.", "measures": {"q": 1.0}}])
    done = CliRunner().invoke(cli, ["samples", str(run_dir), "--evaluation", "-i", "0"])
    assert done.output.startswith("evaluation after iteration 0, prompt 0, sample 0: q 0.25\n  prompt:   Why?")
    done = CliRunner().invoke(cli, ["samples", str(run_dir), "--evaluation", "-i", "-1"])
    assert done.exit_code == 2
    assert "there are no answers before SFT: only a job with the stages sft and ppo has them" in done.output


def test_before_ppo_there_may_be_the_answers_before_sft_alone(tmp_path: Path) -> None:
    answer = {"prompt": "Why?", "prompt_index": 0, "sample_index": 0, "version": BEFORE_SFT, "response": "Zzz."}
    SampleFiles(tmp_path, 10**6).write_evaluation(BEFORE_SFT, [answer])
    assert samples(tmp_path, "--evaluation").startswith("evaluation before SFT, prompt 0")
    done = CliRunner().invoke(cli, ["samples", str(tmp_path), "--evaluation", "-i", "3"])
    assert "the answers after iteration 3 are not kept; there are those of iteration -1 (before SFT)." in done.output


def test_the_answers_before_sft_and_at_the_ends_are_kept_however_little_room_there_is(run_dir: Path) -> None:
    kept = SampleFiles(run_dir, 1)
    for version, answer in ((BEFORE_SFT, "Zzz."), (0, "Erm."), (1, "Hm."), (4, "Because.")):
        question = {"prompt": "Why?", "prompt_index": 0, "sample_index": 0, "version": version}
        kept.write_evaluation(version, [{**question, "response": answer}])
    assert sorted(evaluation_files(run_dir)) == [BEFORE_SFT, 0, 4], "however little room there is, the ends are kept"
    done = CliRunner().invoke(cli, ["samples", str(run_dir), "--evaluation", "-i", "-1"])
    assert done.output.startswith("evaluation before SFT, prompt 0, sample 0: ")
    assert "Zzz." in done.output


def test_a_run_shows_samples_as_it_goes_on() -> None:
    event = {"event": "sample.shown", "which": "best", **row(1, 0.5, f"One.\nTwo.{ESCAPE}")}
    lines = shown_sample(json.dumps(event))
    assert lines is not None
    assert lines[0] == "iteration 1, best response: reward 0.5 (polite 0.5), KL 0.1, 4 tokens"
    assert lines[1:3] == ["  prompt:   Question 1?", "  response: One."]
    assert lines[3].startswith("            Two.")
    assert "\x1b" not in lines[3]
    assert shown_sample('{"event": "iteration.finished"}') is None


def test_text_of_any_language_is_shown_and_what_moves_the_cursor_is_not() -> None:
    shown = "a\N{NO-BREAK SPACE}b\N{IDEOGRAPHIC SPACE}c\u0645\u06cc\N{ZERO WIDTH NON-JOINER}\u0631\u0648\u062f\n\t"
    assert printable(shown) == shown
    bad = "\N{REPLACEMENT CHARACTER}"
    assert printable("\x1b[2J\r\x9b\N{RIGHT-TO-LEFT OVERRIDE}\ud83d\N{LINE SEPARATOR}") == f"{bad}[2J{bad * 5}"


def test_a_folder_that_does_not_exist_is_no_run_without_samples(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["samples", str(tmp_path / "nowhere")])
    assert done.exit_code == 2
    assert f"{tmp_path / 'nowhere'} does not exist; name the folder of a run" in done.output


def test_the_first_record_of_a_list_is_shown_as_the_model_gets_it() -> None:
    event = {"event": "data.first_record", "kind": "prompts", "given": "<user>a\nb\x1b[2J<assistant>", "learnt": ""}
    title = "first record of prompts, as the model gets it:"
    assert first_record(json.dumps(event)) == [title, "  given:    <user>a", "            b�[2J<assistant>"]
    assert first_record(json.dumps({**event, "given": "a", "learnt": "b"})) == [title, "  given:    a", "  learnt:   b"]
    assert first_record('{"event": "iteration.finished"}') is None


def test_an_episode_is_shown_as_its_messages(tmp_path: Path) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "guess", "arguments": {"number": 3}}}
    messages = [
        {"role": "user", "content": "Guess."},
        {"role": "assistant", "content": "I try", "tool_calls": [call]},
        {"role": "tool", "content": "hig\x1bher"},
        {"role": "assistant", "content": "No."},
    ]
    row = {"iteration": 3, "prompt_index": 0, "sample_index": 1, "prompt": "p", "response": "r", "reward": 0.0}
    row |= {"tokens": 9, "finish_reason": "length", "rollout": "rollouts-1", "weight_version": 2}
    learnt = np.array([1, 1, 1, 0, 2, 0, 1, 1, 0], np.uint8)
    stored = StoredEpisode("turns", "", 0.0, messages, 2, 1, learnt, False)
    row |= {"episode": (episode := json.loads(json.dumps(told_of(stored))))}
    assert described(row) == [
        "iteration 3, prompt 0, sample 1: reward 0, 9 tokens, 2 turns, 1 calls, turns",
        "  user:     Guess.",
        "  assistant: I try",
        '            guess({"number": 3})',
        "  tool:     hig\N{REPLACEMENT CHARACTER}her",
        "  assistant: No.",
        "  tokens:   3 learnt, 1 told, 2 asked anew, 2 learnt, 1 told",
        "  drawn:    weights 2 on rollouts-1",
    ]
    assert [(turn["role"], turn["learnt"]) for turn in turns("p", "r", row["episode"])] == [
        ("user", False),
        ("assistant", True),
        ("tool", False),
        ("assistant", True),
    ]
    assert session_lines(row) == [
        "iteration 3, prompt 0, sample 1: reward 0, 9 tokens, 2 turns, 1 calls, turns",
        "  user:     Guess.",
        "turn 1, 3 tokens learnt",
        "  assistant: I try",
        '            guess({"number": 3})',
        "  tool:     hig\N{REPLACEMENT CHARACTER}her",
        "turn 2, 2 tokens learnt",
        "  assistant: No.",
        "  tokens:   3 learnt, 1 told, 2 asked anew, 2 learnt, 1 told",
        "  drawn:    weights 2 on rollouts-1",
    ]
    SampleFiles(tmp_path, 10**9).write(3, [row])
    shown = CliRunner().invoke(cli, ["samples", str(tmp_path), "--session", "0/1"])
    assert "turn 1, 3 tokens learnt" in shown.output
    missing = CliRunner().invoke(cli, ["samples", str(tmp_path), "--session", "0/2"])
    assert missing.exit_code == 2
    assert "there is no episode 0/2 in it" in missing.output
    failed = {**episode, "messages": messages[:2], "turns": 1, "calls": 0, "tokens": [], "discarded": True}
    failed |= {"ending": "environment failed", "why": "the dice fell"}
    assert session_lines({**row, "episode": failed})[2:] == [
        "turn 1",
        "  assistant: I try",
        '            guess({"number": 3})',
        "then environment failed: the dice fell",
        "  drawn:    weights 2 on rollouts-1",
    ]
    with pytest.raises(UsageError, match=r"no episodes: --session is for a job with spec\.sessions"):
        session_lines({name: value for name, value in row.items() if name != "episode"})
    lost = {**episode, "messages": [], "ending": "environment failed", "why": "it is gone", "discarded": True}
    assert described({**row, "episode": lost})[0].endswith("environment failed, it is gone, discarded")
