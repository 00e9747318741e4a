"""Whole jobs: one left in peace, one whose every process is killed, one extended, interrupted, moved and damaged."""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.reporting.page.page_documents import PageDocuments
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.reporting.report import write_report
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT, evaluation_files, read_rows
from dovetail.coordinator.store.identity import delete_run, run_of
from dovetail.coordinator.store.store import open_records
from dovetail.manifest.types import RLHFJob
from helpers.finished_runs import report_answers
from helpers.jobs import (
    Fault,
    Injector,
    events,
    history,
    in_iteration,
    in_stage,
    run_job,
    same_weights,
    sample_rows,
    since_phase,
    summary,
    tiny_job,
    untrained,
)

pytestmark = pytest.mark.slow


def job(iterations: int = 4, **spec: Any) -> RLHFJob:
    """Its learning rates are constant, so that a step does not depend on how many there are."""
    spec.setdefault("evaluation", {"everyIterations": 2, "keepBest": True, "samplesPerPrompt": 2})
    constant = {"learningRate": 1e-4, "schedule": "Constant", "warmupFraction": 0.0}
    ppo = {"iterations": iterations, "actorOptimizer": constant, "criticOptimizer": constant}
    return tiny_job(ppo=ppo, **spec)


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that nobody disturbs. It keeps all its samples. (test_new_user.py has `dovetail run` itself.)"""
    run_dir = tmp_path_factory.mktemp("peaceful")
    outcome, told = run_job(job(checkpoint={"everySteps": 100}), run_dir)
    assert outcome.succeeded, outcome.reason
    assert told == []
    return run_dir


def test_all_three_stages_leave_their_numbers(peaceful: Path) -> None:
    facts = summary(peaceful)
    assert facts["health"]["iterations"] == facts["progress"]["done"]
    assert "LogProbMismatch" not in facts["health"]["reasons"]
    assert facts["sft"]["loss_after"] < facts["sft"]["loss_before"]
    assert 0.0 <= facts["reward_model"]["accuracy"] <= 1.0
    for name in ("reward_first", "reward_last", "kl_last"):
        assert set(facts["ppo"][name]) == {"mean", "ci95"}
    # The held-out prompts, by a measure that is not the learnt reward.
    assert facts["evaluation"]["prompts"] == 20
    for when in ("before_sft", "before_ppo", "after_ppo"):
        assert 0.0 <= facts["evaluation"]["quality"][when]["mean"] <= 1.0
    started, begun = (read_rows(evaluation_files(peaceful)[version]) for version in (BEFORE_SFT, 0))
    assert [row["prompt"] for row in started] == [row["prompt"] for row in begun]
    assert [row["response"] for row in started] != [row["response"] for row in begun], "SFT has changed the model"
    curve = history(peaceful, "evaluation")
    assert sorted(curve) == [0, 2, 4]
    assert {row["samples"] for row in curve.values()} == {40}
    assert curve[4]["reward"] == facts["evaluation"]["reward"]["after_ppo"]["mean"]
    best = max(curve, key=lambda version: (curve[version]["reward"], -version))
    assert facts["evaluation"]["best"]["iteration"] == best
    assert json.loads((peaceful / "models/actor-best/dovetail.json").read_text())["step"] == best
    assert set(facts["phases"]) >= {"generation", "inference", "training", "weights"}
    assert facts["samples_per_second"] > 0
    assert sorted(history(peaceful, "ppo")) == [1, 2, 3, 4]


def test_models_say_what_they_are(peaceful: Path) -> None:
    """The card has the run's own figures, and the settings are those of the training."""
    facts = summary(peaceful)
    card = (peaceful / "models/actor/README.md").read_text()
    assert f"| SFT loss, held out | {facts['sft']['loss_before']:.3f} | {facts['sft']['loss_after']:.3f} |" in card
    assert "after step 4" in card
    assert "| prompts | generated records |" in card
    for name in ("sft", "actor", "actor-best"):
        settings = json.loads((peaceful / "models" / name / "generation_config.json").read_text())
        assert settings["temperature"] == job().spec.generation.temperature
    assert (peaceful / "models/reward/README.md").exists()


def test_every_file_of_a_run_is_known_as_the_runs(peaceful: Path, tmp_path: Path) -> None:
    """So --overwrite deletes all of it, and nothing else."""
    copy = Path(shutil.copytree(peaceful, tmp_path / "run"))
    (copy / "notes.md").write_text("mine")
    run = run_of(copy)
    assert run is not None
    delete_run(copy, run)
    assert sorted(path.name for path in copy.iterdir()) == [".lock", "notes.md"]


def test_every_response_can_be_read_and_makes_up_the_curve(peaceful: Path) -> None:
    for iteration, metrics in history(peaceful, "ppo").items():
        done = CliRunner().invoke(cli, ["samples", str(peaceful), "-i", str(iteration), "--all", "--json"])
        rows = [json.loads(line) for line in done.output.splitlines()]
        assert statistics.fmean(row["reward"] for row in rows) == pytest.approx(metrics["reward"], abs=1e-5)
        assert statistics.fmean(row["tokens"] for row in rows) == pytest.approx(metrics["response_length"], abs=1e-3)
        assert {row["weight_version"] for row in rows} == {iteration - 1}
    assert {e["iteration"] for e in events(peaceful, "sample.shown")} == {1}
    write_report(peaceful)
    assert "evaluation/4" in report_answers(peaceful)


def test_the_run_page_shows_the_tokens_of_every_response(peaceful: Path) -> None:
    documents = PageDocuments(RunFolder(peaceful))

    def ask(question: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(documents.answer(question, time.time(), alive=False))
        return found

    seen = ask("overview")
    assert (seen["state"], seen["done"]) == ("succeeded", max(history(peaceful, "ppo")))
    iteration = seen["token_iterations"][-1]
    for row in ask(f"samples/{iteration}")["rows"][:8]:
        found = ask(f"sample/{iteration}/{row['prompt']}/{row['sample']}")
        tokens = found["tokens_of"]
        assert len(tokens["response"]) == len(tokens["logprob"]) == row["tokens"]
        kl = sum(ours - theirs for ours, theirs in zip(tokens["logprob"], tokens["reference"], strict=True))
        assert kl == pytest.approx(row["kl"], abs=1e-3 * row["tokens"])
        assert found["life"]["parts"][-1]["to"] == row["tokens"]


def test_tensorboard_reads_the_same_curve(peaceful: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    board = EventAccumulator(str(peaceful / "tensorboard"))
    board.Reload()
    rewards = {event.step: float(make_ndarray(event.tensor_proto)) for event in board.Tensors("ppo/reward")}
    expected = {step: row["reward"] for step, row in history(peaceful, "ppo").items()}
    assert rewards == pytest.approx(expected)


def test_the_first_policy_is_the_reference(peaceful: Path) -> None:
    """vLLM, scorer and trainer agree on the log-probabilities of the same weights in float32."""
    first = history(peaceful, "ppo")[1]
    assert abs(first["kl"]) < 1e-4


def test_every_process_and_phase_is_on_the_timeline(peaceful: Path) -> None:
    trace = json.loads((peaceful / "traces" / "iteration-0002.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {"coordinator", "trainer-0", "trainer-1", "rollouts-0", "rollouts-0-scorer"} <= names


def test_the_trained_actor_loads_in_transformers(peaceful: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(peaceful / "models" / "actor")
    tokenizer = AutoTokenizer.from_pretrained(peaceful / "models" / "actor")
    assert model.config.vocab_size >= len(tokenizer)


def without_times(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "seconds"}


def before_sft(status: Any) -> bool:
    return "with the model before SFT" in status["message"] or in_iteration(1)(status)


def test_killing_every_process_costs_nothing_but_time(tmp_path: Path, peaceful: Path) -> None:
    """SIGKILL in every stage: the run goes on by itself, each prompt is answered once, and it learns the same."""
    faults = [
        Fault("trainer-1", in_stage("sft", 4)),
        Fault("coordinator", in_stage("sft", 10)),
        Fault("trainer-0", in_stage("reward", 5)),
        Fault("coordinator", before_sft),
        Fault("rollouts-0", since_phase("generation", 1)),
        Fault("rollouts-1-scorer", since_phase("generation", 2)),
        Fault("coordinator", since_phase("generation", 2)),
        Fault("trainer-1", since_phase("training", 2)),
        Fault("coordinator", since_phase("evaluation", 2)),
        Fault("trainer-0", in_iteration(2)),
        Fault("rollouts-1", since_phase("generation", 3), child=True),
    ]
    injector = Injector(faults)
    patient = job(checkpoint={"everySteps": 100}, failurePolicy={"maxRestarts": 30})
    outcome, told = run_job(patient, tmp_path, injector)
    assert outcome.succeeded, (outcome.reason, told)
    assert [f.process for f in faults if not f.done] == []

    rows = sample_rows(tmp_path)
    assert [row[:3] for row in rows] == [(i, p, 0) for i in range(1, 5) for p in range(16)]
    assert {row[3] for row in rows} == {"trained"}
    # Sampling is keyed by position and replays are exact: the same tokens as in the undisturbed run, to the last one.
    assert [row[4] for row in rows] == [row[4] for row in sample_rows(peaceful)]
    assert untrained(tmp_path) == []
    assert summary(tmp_path)["ppo"]["reward_last"]["mean"] == pytest.approx(
        summary(peaceful)["ppo"]["reward_last"]["mean"], abs=1e-3
    )
    assert summary(tmp_path)["evaluation"] == summary(peaceful)["evaluation"]
    ours, theirs = ({v: without_times(r) for v, r in history(d, "evaluation").items()} for d in (tmp_path, peaceful))
    assert ours == theirs


def test_what_freezes_for_good_is_replaced(tmp_path: Path, peaceful: Path) -> None:
    """SIGSTOP of one of each: the spawner that forks, the coordinator, a trainer rank, the only server, its engine
    core, the only scorer. Each is killed after peerTimeoutSeconds, the run goes on, and ends in the same bits."""
    frozen = [
        ("forker", False, in_stage("sft", 4)),
        ("coordinator", False, in_stage("reward", 4)),
        ("rollouts-0", False, since_phase("generation", 1)),
        ("rollouts-0", True, since_phase("generation", 2)),
        ("trainer-1", False, since_phase("training", 2)),
        ("rollouts-0-scorer", False, since_phase("generation", 3)),
    ]
    faults = [Fault(name, when, child, signal=signal.SIGSTOP) for name, child, when in frozen]
    groups = [
        {"name": "trainers", "roles": ["trainer"], "replicas": 2},
        {"name": "rollouts", "roles": ["rollout"], "replicas": 1},
    ]
    fragile = job(
        failurePolicy={"peerTimeoutSeconds": 6, "maxRestarts": 30}, groups=groups, checkpoint={"everySteps": 100}
    )
    outcome, told = run_job(fragile, tmp_path, Injector(faults))
    assert outcome.succeeded, (outcome.reason, told)
    assert [f.process for f in faults if not f.done] == []
    for name in ("coordinator", "trainer-1", "rollouts-0", "rollouts-0-scorer"):
        assert [t for t in told if t.startswith(f"{name} died (killed, as it hung: stopped for ")], (name, told)
    assert [t for t in told if "rollouts-0 died (killed, as it hung: its process " in t], told
    assert [t for t in told if "its spawner killed, as it hung: stopped for " in t], told
    assert same_weights(peaceful, tmp_path) == []
    assert untrained(tmp_path) == []


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)


def test_a_run_is_extended_when_finished_when_failed_interrupted_moved_and_damaged(
    tmp_path: Path, peaceful: Path
) -> None:
    """In the end it has the bits of a run that had the larger number of iterations from the start."""
    begun, folder = job(1, checkpoint={"everySteps": 2}), tmp_path / "begun"
    outcome, _ = run_job(begun, folder)
    assert outcome.succeeded, outcome.reason
    assert sorted(history(folder, "ppo")) == [1]

    fragile = job(2, checkpoint={"everySteps": 2}, failurePolicy={"maxRestarts": 0})
    outcome, _ = run_job(fragile, folder, Injector([Fault("trainer-1", in_iteration(2))]), resume=True)
    assert not outcome.succeeded
    assert "trainer-1" in outcome.reason
    assert summary(folder)["state"] == "failed"

    more = job(4, checkpoint={"everySteps": 1, "keep": 3})
    saved_again = Injector([], interrupt_when=lambda s: (s["checkpoint"] or {"step": 0})["step"] >= 3)
    outcome, _ = run_job(more, folder, saved_again, resume=True)
    assert outcome.interrupted
    moved = tmp_path / "moved"
    folder.rename(moved)
    records = open_records(moved)
    last = records.get("checkpoint/ppo")
    records.close()
    flip_a_bit(next((moved / last["path"]).glob("__1_*")))
    outcome, _ = run_job(more, moved, resume=True)
    assert outcome.succeeded, outcome.reason
    assert not folder.exists()
    assert untrained(moved) == []
    assert sorted(history(moved, "ppo")) == [1, 2, 3, 4]
    finished = [e["stage"] for e in events(moved, "stage.finished")]
    assert finished.count("sft") == 1, "SFT was run again"
    changed = [(e["field"], e["old"], e["new"], e["stage"], e["step"]) for e in events(moved, "run.changed")]
    (finished_at, failed_at) = (c[1:] for c in changed if c[0] == "spec.ppo.iterations")
    assert finished_at == (1, 2, "ppo", 1)
    assert failed_at[:3] == (2, 4, "ppo")
    assert failed_at[3] in (1, 2), "step 2 is settled if its batch was stored before the run failed"
    assert {field for field, *_ in changed} == {
        "spec.ppo.iterations",
        "spec.checkpoint.everySteps",
        "spec.checkpoint.keep",
        "spec.failurePolicy.maxRestarts",
    }
    assert [c["field"] for c in summary(moved)["changes"]] == [e["field"] for e in events(moved, "run.changed")]
    (fallen,) = events(moved, "checkpoint.damaged")
    assert fallen["step"] == last["step"] > fallen["going_on_from_step"] >= 2
    # As if the coordinator had been killed before the last iteration's checkpoint was written.
    shutil.rmtree(moved / "checkpoints" / "ppo-000004")
    before = max((moved / "checkpoints").glob("ppo-*"))
    records = open_records(moved)
    records.put("checkpoint/ppo", {"step": int(before.name.removeprefix("ppo-")), "path": f"checkpoints/{before.name}"})
    records.close()
    outcome, _ = run_job(more, moved, resume=True)
    assert outcome.succeeded, outcome.reason
    for model in ("actor", "critic"):
        file = Path("models") / model / "model.safetensors"
        assert (moved / file).read_bytes() == (peaceful / file).read_bytes(), model
        # Without the finished model it comes from the checkpoint.
        finished = (moved / "models" / model).rename(tmp_path / f"finished-{model}")
        words = ["export", str(moved), "--model", model, "--iteration", "4", "-o", str(tmp_path / model)]
        exported = CliRunner().invoke(cli, words)
        assert exported.exit_code == 0, exported.output
        for path in (path for path in finished.rglob("*") if path.suffix != ".md"):
            same = tmp_path / model / path.relative_to(finished)
            assert path.is_dir() or same.read_bytes() == path.read_bytes(), path


def test_an_iteration_is_replayed_to_the_same_bits(peaceful: Path) -> None:
    """By its trainer ranks alone, from its stored batches. No checkpoint is kept: from the beginning to the exports."""
    before = {path: path.stat().st_mtime_ns for path in (peaceful / "models").rglob("*")}
    replayed = CliRunner().invoke(cli, ["debug", "replay", str(peaceful), "--iteration", "3"])
    assert replayed.exit_code == 0, replayed.output
    assert replayed.output.splitlines()[0] == (
        "Replaying iterations 1 to 4 from the beginning of PPO on 2 trainer ranks."
    )
    assert "iteration 3: the metrics are those of the run" in replayed.output
    assert "The weights after iteration 4 are those of models, bit for bit: " in replayed.output
    assert {path: path.stat().st_mtime_ns for path in (peaceful / "models").rglob("*")} == before
