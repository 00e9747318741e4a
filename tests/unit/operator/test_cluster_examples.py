"""The examples for a cluster pass `dovetail validate` and `plan`, and their pods have what they name."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.kube import names
from dovetail.manifest.checks.validation import warnings
from dovetail.manifest.documents import parse, read_yaml
from dovetail.manifest.resolve import resolve
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import jobset
from dovetail.planner.make_plan import make_plan

FOLDER = Path(__file__).parents[3] / "examples/cluster"
JOBS = {path.stem: path for path in sorted(FOLDER.glob("*.yaml")) if "kind: RLHFJob" in path.read_text()}
WANTED = {"getting-started", "hugging-face", "own-data", "reward-function", "grpo-8-gpus"}


def test_all_are_there() -> None:
    assert set(JOBS) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_it_is_valid_and_planned(name: str) -> None:
    for command in ("validate", "plan"):
        done = CliRunner().invoke(cli, [command, str(JOBS[name])], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert warnings(parse(read_yaml(JOBS[name])).spec, cluster=True) == []


@pytest.mark.parametrize("name", sorted(WANTED))
def test_its_pods_mount_and_know_what_it_names(name: str) -> None:
    job = parse(read_yaml(JOBS[name]))
    job = job.model_copy(update={"spec": resolve(job.spec)})
    rendered = jobset(RenderContext(job, "0" * 36, make_plan(job.spec), OperatorSettings()))
    (coordinator,) = [
        each["template"]["spec"]["template"]["spec"]
        for each in rendered["spec"]["replicatedJobs"]
        if each["name"] == "coordinator"
    ]
    named = {volume["configMap"]["name"] for volume in coordinator["volumes"] if "configMap" in volume}
    named |= {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in coordinator["volumes"]
        if "persistentVolumeClaim" in volume
    }
    (container,) = coordinator["containers"]
    named |= {
        variable["valueFrom"]["secretKeyRef"]["name"]
        for variable in container["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    text = JOBS[name].read_text()
    for thing in ("hf-token", "grader", "my-data", "my-models", "my-runs"):
        said = [line for line in text.splitlines() if thing in line and not line.lstrip().startswith("#")]
        assert (thing in named) == bool(said), thing
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {names.VOLUME_MOUNT, names.CONFIG_MOUNT}
