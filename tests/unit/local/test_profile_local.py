"""A local profile: what `dovetail plan` says with one and without, this machine's figures, and a run's files."""

from __future__ import annotations

import itertools
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.gpus.gpu_products import parse
from dovetail.manifest.checks.validation import load_manifest
from dovetail.manifest.types import RLHFJob
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.files.machine_profile import ModelTimes, PassTimes, Profile
from dovetail.protocol.files.trace import chrome_trace
from dovetail.protocol.messages import Span
from dovetail.tools.calibrate import calibration_jobs, observe, run_lengths
from dovetail.trainer.profile import hardware_toml
from helpers.two_cores import MACHINE

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


def profile(layers: int = 2, hidden: int = 128) -> Profile:
    parts = [PassTimes(micro_batch=1, forward=1, backward=2, input_gradient=1, weight_gradient=1, activation_bytes=1)]
    times = {
        name: ModelTimes(
            head=head,
            layers=layers,
            hidden_size=hidden,
            bytes_per_value=4,
            embedding_times=parts,
            layer_times=parts,
            head_times=parts,
        )
        for name, head in (("actor", "lm"), ("critic", "value"))
    }
    return Profile(device="cpu", threads=1, tokens=8, models=times, machine=MACHINE)


def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, manifest: Path = QUICKSTART) -> str:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["plan", str(manifest), *arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def write(path: Path, made: Profile) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made.model_dump_json(by_alias=True))
    return path


def test_without_a_profile_a_plan_names_the_command_that_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = plan(tmp_path, monkeypatch)
    assert "this machine has not been measured" in told
    assert f"dovetail profile {QUICKSTART} --iterations -o runs/quickstart/profile.json" in told
    assert "PPO iterations (" not in told
    assert "configuration of" not in told
    old = write(tmp_path / "old.json", profile().model_copy(update={"machine": None}))
    assert f"--iterations -o {old}" in plan(tmp_path, monkeypatch, "--profile", str(old))


def test_a_profile_of_other_models_is_refused_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write(tmp_path / "other.json", profile(layers=3))
    assert "measured with another actor" in plan(tmp_path, monkeypatch, "--profile", str(other))


def test_other_reasons_are_told_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = yaml.safe_load(QUICKSTART.read_text())
    document["spec"]["models"]["actor"]["source"] = {"huggingFace": "somebody/nothing-here"}
    document["spec"]["models"]["tokenizer"] = {}
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(document))
    told = plan(tmp_path, monkeypatch, manifest=manifest)
    assert "hf download somebody/nothing-here config.json" in told
    assert "measured" not in told
    told = plan(tmp_path, monkeypatch, "--set", "spec.stages=[sft]")
    assert "no PPO iterations" in told
    assert "measured" not in told


@pytest.mark.slow
def test_a_profile_in_the_run_directory_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "runs" / "quickstart" / "profile.json", profile())
    told = plan(tmp_path, monkeypatch)
    assert "Hardware figures: measured" in told
    assert "Nothing is predicted" not in told
    found = json.loads(CliRunner().invoke(cli, ["plan", str(QUICKSTART), "--json"]).stdout)["prediction"]
    assert set(found["phases"]) == {"generation", "inference", "training", "transfer", "other"}
    assert sum(found["phases"].values()) == pytest.approx(found["iterationSeconds"])
    assert found["samplesPerSecond"] == pytest.approx(128 / found["iterationSeconds"])


@pytest.mark.slow
def test_an_earlier_run_tells_how_long_responses_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "runs" / "quickstart"
    write(run_dir / "profile.json", profile())
    taken = []
    for mean in (10.0, 40.0):
        metrics = {"response_length": mean, "response_length_max": 2 * mean, "samples": 128.0}
        (run_dir / "history.jsonl").write_text(json.dumps({"stage": "ppo", "step": 1, "metrics": metrics}) + "\n")
        median, sigma = run_lengths(run_dir) or (0.0, 0.0)
        drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, (400, 128))
        assert drawn.mean() == pytest.approx(mean, rel=0.03)
        assert np.median(drawn.max(1)) == pytest.approx(2 * mean, rel=0.1)
        plan(tmp_path, monkeypatch)
        found = json.loads(CliRunner().invoke(cli, ["plan", str(QUICKSTART), "--json"]).stdout)["prediction"]
        taken.append(found["phases"]["generation"])
    assert taken[1] > 2 * taken[0]


@pytest.mark.slow
def test_auto_takes_the_layout_and_placement_that_are_predicted_to_be_fastest() -> None:
    job = load_manifest(QUICKSTART)
    auto = job.spec.model_copy(update={"plan": job.spec.plan.model_copy(update={"parallelism": "Auto"})})
    for message, pp in ((0.0, 1), (0.5, 1)):
        costs = MACHINE.training.model_copy(update={"message": message})
        machine = MACHINE.model_copy(update={"training": costs})
        chosen = make_plan(auto, profile=profile().model_copy(update={"machine": machine}))
        assert chosen.prediction is not None
        assert chosen.parallelism["actor"].pp == pp
        assert chosen.prediction.iteration_seconds <= 1.05 * min(
            other.seconds or 0.0 for other in chosen.prediction.alternatives
        )
    costly = MACHINE.training.model_copy(update={"exchange": 5.0})
    chosen = make_plan(
        auto, profile=profile().model_copy(update={"machine": MACHINE.model_copy(update={"training": costly})})
    )
    assert chosen.parallelism["actor"].pp == 2


def test_this_machines_figures_are_a_hardware_file() -> None:
    """A clock that advances by a second whenever it is read."""
    text = hardware_toml(torch.device("cpu"), None, itertools.count().__next__)
    assert list(tomllib.loads(text)) == ["cpu"]
    found = parse(text, measured=True)["cpu"]
    assert found.measured
    assert list(found.flops.values()) == [pytest.approx(2 * 1024**3, rel=1e-3)]
    assert found.memory_bandwidth == pytest.approx(2 * 64 * 2**20, rel=1e-3)
    assert found.memory > 2**28


def test_the_jobs_that_measure_are_valid_and_differ() -> None:
    job = load_manifest(QUICKSTART)
    made = calibration_jobs(job, 2)
    plans = [make_plan(each.spec) for each in made]
    assert [(p.world_size, len(p.rollouts), p.parallelism["actor"].pp) for p in plans] == [
        (1, 1, 1),
        (1, 1, 1),
        (2, 2, 1),
        (2, 2, 2),
    ]
    assert len({tuple(r.scores) for r in plans[3].rollouts}) == 2
    assert all(RLHFJob.model_validate(each.model_dump(by_alias=True)) for each in made)


def test_a_runs_files_tell_of_its_iterations(tmp_path: Path) -> None:
    job = calibration_jobs(load_manifest(QUICKSTART), 2)[2]
    made = make_plan(job.spec)
    lengths = {"prompt_lengths": np.full(4, 9, np.int32), "response_lengths": np.array([5, 2, 7, 3], np.int32)}
    files = ExperienceFiles(tmp_path)
    rows = []
    (tmp_path / "traces").mkdir()
    for iteration in (1, 2):
        files.write(iteration, lengths)
        scorer = f"{made.rollouts[0].name}-scorer"
        spans = [
            Span(name="generation", process="coordinator", lane="phases", start=100.0, end=101.0),
            Span(name="inference", process=scorer, start=101.0, end=101.5, args={"n": 2, "tokens": 30}),
            Span(name="actor F0", process="trainer-0", lane="actions", start=102.0, end=102.5),
            Span(name="actor B0", process="trainer-1", lane="actions", start=102.0, end=103.0),
            Span(name="mini-batch 0", process="trainer-0", lane="phases", start=102.0, end=103.2),
            Span(name="mini-batch 0", process="trainer-1", lane="phases", start=102.0, end=103.2),
        ]
        trace = chrome_trace(spans, {}, {"samples left": [(100.0, 4), (100.25, 3), (101.0, 0)]})
        (tmp_path / "traces" / f"iteration-{iteration:04d}.json").write_text(json.dumps(trace))
        seconds = dict.fromkeys(("generation", "inference", "training", "weights", "other"), 1.0)
        metrics = {f"seconds_{name}": value for name, value in seconds.items()}
        rows.append(json.dumps({"stage": "ppo", "step": iteration, "metrics": metrics}))
    (tmp_path / "history.jsonl").write_text("\n".join(rows) + "\n")
    (found,) = observe(job.spec, made, tmp_path, 1)
    assert found.work.responses == (5, 2, 7, 3)
    assert found.work.prompts == (9,) * 4
    assert (found.work.dp, found.work.rollouts, found.work.models) == (2, 2, ("actor", "critic"))
    assert found.finished == [(pytest.approx(0.25), 3), (pytest.approx(1.0), 0)]
    assert found.batches == [(tuple(made.rollouts[0].scores), 30, pytest.approx(0.5))]
    assert found.passes == {"actor": pytest.approx(0.75), "critic": 0.0}
    assert found.waited == pytest.approx(0.25)
