"""The command line: help, exit codes, and one sentence for each mistake."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from click.testing import CliRunner
from packaging.requirements import Requirement

from dovetail.cli.common.one_line_options import apply_overrides
from dovetail.cli.entry import start
from dovetail.cli.main import cli
from dovetail.cli.run import Follower, event_line, next_steps
from dovetail.launch.supervisor import Outcome
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.process.extras import DISTRIBUTION, MARKS, require
from helpers.finished_runs import finished_run
from helpers.patience import PATIENCE

JOB = {
    "apiVersion": "dovetail.dev/v1beta1",
    "kind": "RLHFJob",
    "metadata": {"name": "small"},
    "spec": {
        "models": {
            "actor": {"source": {"scratch": {"config": {"hidden_size": 64, "num_attention_heads": 2}}}},
            "tokenizer": {"train": {"vocabSize": 300}},
        },
        "data": {
            "demonstrations": [{"synthetic": {}}],
            "preferences": [{"synthetic": {}}],
            "prompts": [{"synthetic": {}}],
            "maxPromptTokens": 32,
            "maxTokens": 64,
        },
        "ppo": {"iterations": 2},
        "generation": {"maxTokens": 16},
        "groups": [
            {"name": "train", "roles": ["trainer"], "replicas": 2},
            {"name": "gen", "roles": ["rollout"], "replicas": 2},
        ],
    },
}


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return str(path)


def call(*args, **more):
    return CliRunner().invoke(cli, list(map(str, args)), **more)


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback(monkeypatch):
    class Importing:
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "dovetail.cli.main", Importing())
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 130
    script = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["scripts"]["dovetail"]
    assert script == "dovetail.cli.entry:start"


def test_help_lists_every_command():
    result = call("--help")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.output.split("Commands:")[1].splitlines() if line.strip()]
    assert listed == [
        "init",
        "data",
        "run",
        "ui",
        "samples",
        "chat",
        "serve",
        "push",
        "export",
        "report",
        "audit",
        "validate",
        "plan",
        "schedule",
        "profile",
        "doctor",
        "model",
        "explain",
        "debug",
        "version",
    ]
    for name in listed:
        assert call(name, "--help").exit_code == 0


def test_version():
    assert call("version").output.startswith("dovetail 0.")
    assert call("--version").output == call("version").output


def test_missing_extras_are_named_in_one_sentence():
    def sentence(extras, present):
        with pytest.raises(UsageError) as caught:
            require("dovetail run", extras, present.__contains__)
        return str(caught.value)

    assert sentence(["coordinator"], ()) == (
        "dovetail run needs the extra 'coordinator': pip install 'dovetail-rlhf[coordinator]'"
    )
    both = sentence(["coordinator", "trainer", "rollout-gpu"], ("torch",))
    assert both.endswith(
        "the extras 'coordinator' and 'rollout-gpu': pip install 'dovetail-rlhf[coordinator,rollout-gpu]'"
    )
    require("dovetail run", MARKS)  # all of this environment's are there


def test_extras_that_are_asked_for_exist():
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(MARKS) <= set(pyproject["optional-dependencies"])
    assert pyproject["name"] == DISTRIBUTION


def test_validate_says_what_it_found(manifest):
    result = call("validate", manifest)
    assert result.exit_code == 0, result.output
    assert "is valid: small, stages sft, reward, ppo; 2 trainer ranks, 2 rollouts." in result.output


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("spec.ppo.iteration=3", "spec.ppo.iteration is not a field; did you mean iterations?"),
        ("ppo.iterations=3", "--set ppo.iterations=3: did you mean spec.ppo.iterations=3?"),
        ("groups[0].replicas=3", "--set groups[0].replicas=3: did you mean spec.groups[0].replicas=3?"),
        ("lr=3", "--set lr=3: did you mean spec.sft.optimizer.learningRate=3?"),
        ("spec.ppo.iterations=many", "spec.ppo.iterations must be"),
        ("spec.ppo.iterations", "write it as field=value"),
        ("spec..x=1", "write it as field=value"),
        ("spec.groups[7].replicas=1", "no list entry [7]"),
        ("spec.seed.x=1", "x is not below a mapping"),
    ],
)
def test_mistakes_exit_with_2_and_one_sentence(manifest, override, sentence):
    job_with_seed = {**JOB, "spec": {**JOB["spec"], "seed": 1}}
    with open(manifest, "w") as file:
        yaml.safe_dump(job_with_seed, file)
    result = call("validate", manifest, "--set", override)
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert all(line.startswith("Error: ") for line in result.output.splitlines())


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--gpus", "--set spec.groups[0].gpu.perPod=N"),
        ("--lr", "dovetail explain WORD finds the field"),
        ("--output-dir", "--run-dir says where"),
        ("--overwrit", "--overwrite"),
    ],
)
def test_options_of_other_tools_are_explained(manifest, option, said):
    result = call("run", manifest, option, "4")
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["export", "runs/x", "--output-dir", "y"], "--run-dir"),
        (["data", "x.jsonl", "--out", "y"], "--run-dir"),
        (["init", "sft", "new", "--dataset", "y"], "--prompts"),
        (["push", "runs/x", "me/mine", "--config", "y"], "The manifest"),
    ],
)
def test_no_command_names_an_option_that_it_lacks(words, hint):
    result = call(*words)
    assert result.exit_code != 0
    assert hint not in result.output


@pytest.mark.parametrize("option", ["--model", "--prompts"])
def test_a_hubs_address_is_explained_on_the_command_line(option):
    given = {"--model": "a/b", "--prompts": "c/d", "--reward": "e:f"} | {option: "https://huggingface.co/me/mine"}
    result = call("run", "--method", "grpo", "--print-only", *(word for pair in given.items() for word in pair))
    assert result.exit_code == 2
    assert f"{option} https://huggingface.co/me/mine is an address; write me/mine" in result.output


def test_more_stages_than_layers_are_refused_when_a_manifest_is_validated(manifest, tmp_path):
    pins = ["--set", "spec.plan.parallelism={actor: {pp: 2}, critic: {pp: 2}}"]
    layers = "spec.models.actor.source.scratch.config.num_hidden_layers"
    assert call("validate", manifest, *pins, "--set", f"{layers}=2").exit_code == 0
    result = call("validate", manifest, *pins, "--set", f"{layers}=1")
    assert result.exit_code == 2
    assert "spec.plan.parallelism.actor.pp is 2, but the actor has only 1 layers; lower it" in result.output


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["spec.groups[0].replicas=6", "spec.plan.parallelism={actor: {pp: 3, dp: 2}, critic: {pp: 2, dp: 3}}"],
            "the actor's pp 3 and the critic's pp 2 do not divide each other, so their pipelines cannot share a "
            "schedule; make the lower one of 1, 3",
        ),
        (
            ["spec.ppo.microBatchSize=5", "spec.plan.parallelism={actor: {pp: 2}}"],
            "which cannot be cut into micro-batches of 5 (spec.ppo.microBatchSize) on the actor; make it a multiple",
        ),
    ],
)
def test_pipelines_that_no_schedule_fits_are_refused_when_a_manifest_is_validated(manifest, overrides, sentence):
    layers = "spec.models.actor.source.scratch.config.num_hidden_layers=6"
    batches = ["spec.ppo.globalBatchSize=48", "spec.ppo.miniBatchSize=24", "spec.ppo.microBatchSize=2"]
    arguments = [x for value in (layers, *batches, *overrides) for x in ("--set", f"{value}")]
    result = call("validate", manifest, *arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    serial = call("validate", manifest, *arguments, "--set", "spec.plan.intraStageFusion=Serial")
    assert "share a schedule" not in serial.output, "one model after the other needs no common pipeline"


def test_a_manifest_that_is_not_there(tmp_path):
    result = call("validate", tmp_path / "none.yaml")
    assert result.exit_code == 2
    assert "none.yaml" in result.output


def test_overrides_change_fields_by_their_yaml_values():
    document = {"spec": {"groups": [{"replicas": 1}], "ppo": None}}
    apply_overrides(
        document, ["spec.groups[0].replicas=3", "spec.ppo.kl.coef=1e-2", "spec.stages=[sft]", "spec.plan.x=Off"]
    )
    assert document["spec"] == {
        "groups": [{"replicas": 3}],
        "ppo": {"kl": {"coef": 0.01}},
        "stages": ["sft"],
        "plan": {"x": "Off"},
    }


def test_plan_as_table_and_as_json(manifest):
    table = call("plan", manifest)
    assert table.exit_code == 0
    for name in ("trainer-1", "gen-1-scorer", "critic_training"):
        assert name in table.output
    document = json.loads(call("plan", manifest, "--json").stdout)
    assert [t["name"] for t in document["trainers"]] == ["trainer-0", "trainer-1"]


def test_explain():
    assert "iterations" in call("explain", "RLHFJob.spec.ppo").output
    wrong = call("explain", "RLHFJob.spec.nothing")
    assert wrong.exit_code == 2
    assert "nothing" in wrong.output
    assert "Traceback" not in wrong.output


def test_report_of_a_finished_run(tmp_path):
    run = finished_run(tmp_path / "run")
    result = call("report", run)
    assert result.exit_code == 0
    assert "Reward per sample" in result.output
    assert (run / "report.html").exists()


def test_report_and_chat_without_a_run(tmp_path):
    for command in ("report", "chat"):
        result = call(command, tmp_path)
        assert result.exit_code == 1
        assert str(tmp_path) in result.output


class FakeLauncher:
    """Stands in for the real one: ends as told, and leaves what a run leaves."""

    outcome = Outcome(True)
    made: ClassVar[list] = []

    def __init__(self, job, plan, run_dir, earlier, **options):
        self.job, self.run_dir, self.earlier, self.options = job, run_dir, earlier, options
        self.url, self.token, self.specs = "http://127.0.0.1:9", "", []
        FakeLauncher.made.append(self)

    def __enter__(self):
        finished_run(self.run_dir)
        return self

    def __exit__(self, *_):
        pass

    def run(self, on_step):
        on_step()
        return self.outcome


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("dovetail.cli.run.Launcher", FakeLauncher)
    FakeLauncher.made = []
    FakeLauncher.outcome = Outcome(True)
    return FakeLauncher


def test_run_ends_with_table_report_and_the_next_step(manifest, fake, tmp_path):
    result = call("run", manifest, "--run-dir", tmp_path / "r", "--seed", 5, "--set", "spec.ppo.iterations=9")
    assert result.exit_code == 0, result.output
    assert "Reward per sample" in result.output
    assert f"dovetail ui {tmp_path / 'r'}" in result.output
    # Nothing can be served yet: this launcher makes no models.
    assert "dovetail serve" not in result.output
    assert (fake.made[0].job.spec.seed, fake.made[0].job.spec.ppo.iterations) == (5, 9)
    assert (tmp_path / "r" / "report.html").exists()


def test_the_commands_at_the_end_of_a_run_can_be_pasted(manifest, fake, tmp_path, monkeypatch):
    """A folder may have spaces, and what rich takes for markup."""
    monkeypatch.setattr("dovetail.cli.run.files", lambda _: ["iteration-000001.jsonl"])
    folder = tmp_path / "my runs[b]"
    result = call("run", manifest, "--run-dir", folder)
    assert result.exit_code == 0, result.output
    assert f"Report:  {folder / 'report.html'}" in result.output
    assert f"Samples: dovetail samples '{folder}'" in result.output
    assert f"Page:    dovetail ui '{folder}'" in result.output
    assert f"Report:  {folder / 'report.html'}" in call("report", folder).output


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_text_that_the_terminal_does_not_have_ends_no_command(tmp_path, encoding):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "\u4f60\u597d \\u001b[2J"}\n')
    command = [sys.executable, "-P", "-m", "dovetail.cli.main", "data", str(file)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "\\u4f60\\u597d" in done.stdout
    assert "\x1b" not in done.stdout, "records may not move the cursor"


@pytest.mark.parametrize(("models", "chosen"), [(["actor", "sft"], ""), (["sft"], " --model sft")])
def test_a_run_says_how_its_model_is_used(tmp_path, models, chosen):
    for name in models:
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    assert [line.split(maxsplit=1)[1] for line in next_steps(tmp_path)] == [
        f"dovetail chat {tmp_path}{chosen}",
        f"dovetail serve {tmp_path}{chosen}",
        f"dovetail push {tmp_path}{chosen} OWNER/NAME",
    ]


def test_the_run_directory_is_named_after_the_job(manifest, fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("run", manifest).exit_code == 0
    assert str(fake.made[0].run_dir) == "runs/small"


def test_a_failed_run_exits_with_1_and_its_reason(manifest, fake, tmp_path):
    fake.outcome = Outcome(False, "gen-0 died (signal SIGKILL)")
    result = call("run", manifest, "--run-dir", tmp_path / "r")
    assert result.exit_code == 1
    assert "the run failed: gen-0 died (signal SIGKILL)" in result.output


def test_an_interrupted_run_exits_with_130_and_says_how_to_resume(manifest, fake, tmp_path):
    fake.outcome = Outcome(False, "interrupted", interrupted=True)
    result = call("run", manifest, "--run-dir", tmp_path / "r", "--seed", 5)
    assert result.exit_code == 130
    assert f"dovetail run {manifest} --seed 5 --run-dir {tmp_path / 'r'} --resume" in result.output


def test_resume_and_overwrite_exclude_each_other(manifest, fake):
    result = call("run", manifest, "--resume", "--overwrite")
    assert result.exit_code == 2
    assert not fake.made


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("in use"), 2), (RunError("disk full"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_become_exit_codes(manifest, monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("dovetail.cli.run.run_job", fail)
    result = call("run", manifest)
    assert result.exit_code == code
    assert str(error) in result.output


def test_manifest_paths_start_at_the_manifest(fake, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "hello"}\n')
    job = json.loads(json.dumps(JOB))
    job["spec"]["data"]["demonstrations"] = [{"path": "data.jsonl"}]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert call("run", tmp_path / "job.yaml", "--run-dir", tmp_path / "r").exit_code == 0
    assert fake.made[0].job.spec.data.demonstrations[0].path == str(tmp_path / "data.jsonl")


def test_events_are_followed_line_by_line(tmp_path):
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert follower.lines() == []
    path.write_text('{"time": 1.0, "process": "coordinator", "event": "a", "x": 1}\n{"ev')
    assert [event_line(line) for line in follower.lines()] == ["a x=1"]
    with path.open("a") as file:
        file.write('ent": "b"}\n')
    assert [event_line(line) for line in follower.lines()] == ["b"]
    assert event_line("not json") == "not json"


def plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.slow
def test_the_command_line_starts_without_any_extra():
    """It loads nothing but the standard library and what the package itself requires."""
    todo, required = {"dovetail-rlhf"}, set()
    while todo:
        name = plain(todo.pop())
        if name not in required:
            required.add(name)
            asked = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
            todo |= {one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})}
    # What .pth files load is there before.
    code = "import sys; before = set(sys.modules); import dovetail.cli.main; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    loaded = {module.partition(".")[0] for module in done.stdout.split()}
    owners = importlib.metadata.packages_distributions()
    assert {module for module in loaded for owner in owners.get(module, ()) if plain(owner) not in required} == set()


# ---------------------------------------------------------------- GPUs that are not there


@pytest.mark.parametrize(
    ("gpu", "present", "sentence"),
    [
        (
            {"product": "NVIDIA-A10"},
            0,
            "spec.groups[1].gpu asks for 1 x NVIDIA-A10 a pod, but this machine has no GPU;",
        ),
        ({"product": "NVIDIA-A10", "perPod": 2}, 0, "asks for 2 x NVIDIA-A10 a pod"),
        ({"perPod": 1}, 0, "spec.groups[1].gpu.perPod is 1, but without gpu.product the group runs on CPUs;"),
        ({"perPod": 1}, 4, "spec.groups[1].gpu.perPod is 1, but without gpu.product the group runs on CPUs;"),
        ({"product": "NVIDIA-A10"}, 1, None),
        ({"perPod": 0}, 0, None),
        ({}, 0, None),
    ],
)
def test_gpus_that_are_not_there_are_refused_unless_cpus_are_meant(manifest, monkeypatch, gpu, present, sentence):
    path = Path(manifest)
    job = yaml.safe_load(path.read_text())
    job["spec"]["groups"][1]["gpu"] = gpu
    path.write_text(yaml.safe_dump(job))
    ran = []
    monkeypatch.setattr("dovetail.gpus.nvidia_driver.cuda_devices", lambda: [str(i) for i in range(present)])
    monkeypatch.setattr("dovetail.cli.run.run_job", lambda job, *_, **more: ran.append((job, more["hint"])) or 0)
    result = CliRunner().invoke(cli, ["run", str(manifest)])
    if sentence is None:
        assert result.exit_code == 0, result.output
        assert len(ran) == 1
        return
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "--cpu" in result.stderr
    assert ran == []
    assert CliRunner().invoke(cli, ["run", str(manifest), "--cpu"]).exit_code == 0
    assert all(group.on_cpu for group in ran[0][0].spec.groups)
    assert ran[0][0].spec.groups[1].dtype == "float32", "as where no GPU was asked for"
    assert "--cpu" in ran[0][1], "a resume must mean CPUs too"
    assert CliRunner().invoke(cli, ["validate", str(manifest)]).exit_code == 0, "clusters may have them"


def test_a_replay_is_not_written_among_other_files(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "job.json").write_text("mine")
    result = call("debug", "replay", tmp_path, "--iteration", 1, "--keep", tmp_path / "kept")
    assert result.exit_code == 2
    assert "kept is not empty, and the replay would write into it; name a new folder" in " ".join(result.output.split())
    assert (tmp_path / "kept" / "job.json").read_text() == "mine"


# ---------------------------------------------------------------- classes

CLASS = {
    "apiVersion": "dovetail.dev/v1beta1",
    "kind": "RLHFJobClass",
    "metadata": {"name": "cpus"},
    "spec": {"queue": "research", "trainer": {"image": "trainer:1"}, "allowed": {"secrets": ["wandb"]}},
}


@pytest.fixture
def of_class(tmp_path, monkeypatch):
    """A manifest of a class, the class as a file, and a kubectl that answers with it."""
    job, given = tmp_path / "job.yaml", tmp_path / "class.yaml"
    job.write_text(yaml.safe_dump(JOB | {"spec": JOB["spec"] | {"class": "cpus"}}))
    given.write_text(yaml.safe_dump(CLASS))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f"#!/bin/sh\n[ $2/$3 = rlhfjobclasses.dovetail.dev/cpus ] && cat <<END\n{json.dumps(CLASS)}\nEND\n"
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return str(job), str(given), kubectl


def test_a_job_is_validated_with_its_class_from_a_file_or_the_cluster(of_class):
    job, given, _ = of_class
    for words in (["--class", given], []):
        done = call("validate", job, *words)
        assert done.exit_code == 0, done.output
        assert "; class cpus (queue research, trainer image trainer:1)." in done.output
        assert "The pods are of class cpus (queue research" in call("plan", job, *words).output
        refused = call("validate", job, *words, "--set", "spec.hub.tokenSecret.name=other")
        assert refused.exit_code == 2
        assert "spec.hub.tokenSecret names other, which class cpus does not allow (secrets: wandb)" in refused.output


def test_a_class_that_kubectl_does_not_get_is_a_warning(of_class):
    job, _, kubectl = of_class
    kubectl.write_text("#!/bin/sh\necho 'Error from server (NotFound): no cpus' >&2\nexit 1\n")
    done = call("validate", job)
    assert done.exit_code == 0, done.output
    assert "kubectl did not get class cpus (Error from server (NotFound): no cpus), so its rules are not" in done.output


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("gpus", "spec.class is gpus, and"), ("null", "spec.class is missing, and")],
)
def test_a_class_file_must_be_of_the_class_that_the_job_names(of_class, name, sentence):
    job, given, _ = of_class
    done = call("validate", job, "--class", given, "--set", f"spec.class={name}")
    assert done.exit_code == 2
    assert sentence in done.output
    assert "write class: cpus" in done.output
