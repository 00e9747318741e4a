"""A job in the pods that the operator renders, run as processes with the pods' own commands and environment.

Where clusters can run, this is a test of `make test-nightly`, and tests/cluster has the same on real kubelets in every
run: test_faults.py a deleted and a killed trainer's pod, a drained rollout, and that nothing else restarts;
test_kueue.py a surplus rollout that joins and is retired. A pod of two ranks is in tests/nullgpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.render.context import RenderContext
from dovetail.planner.make_plan import make_plan
from helpers.cluster import unsupported
from helpers.fake_kubelet import FakeKubelet
from helpers.jobs import MANIFEST, events, history, paced_reward, set_pace, summary

pytestmark = [pytest.mark.slow]
if unsupported() is None:
    pytestmark.append(pytest.mark.nightly)
SECONDS = 1200.0
ITERATIONS = 5
# An iteration takes a second, a server far longer to start: one is held until the servers that come later are there.
PACE_SECONDS, HELD_SECONDS = 4.0, 1000.0
UID = "0a1b2c3d-0000-4000-8000-000000000000"
# GPU products, on a machine without GPUs: everything falls back to CPUs, as pretended devices make it do.
GROUPS = [
    {"name": "a100", "roles": ["trainer"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 2}},
    {"name": "v100", "roles": ["rollout"], "gpu": {"product": "Tesla-V100-SXM2-32GB", "perPod": 1}, "dtype": "float16"},
    {
        "name": "a10",
        "roles": ["rollout"],
        "gpu": {"product": "NVIDIA-A10", "perPod": 1},
        "minReplicas": 1,
        "maxReplicas": 2,
    },
]


def in_ppo(iteration: int) -> Any:
    return lambda status: status.get("stage") == "ppo" and status["iteration"] >= iteration


def paced(folder: Path, told: Path) -> RenderContext:
    """A job whose iterations last PACE_SECONDS longer, until `told` says otherwise. Its code is in `folder`."""
    path = {"name": "PYTHONPATH", "value": str(folder)}
    template = {"spec": {"containers": [{"name": "dovetail", "env": [path]}]}}
    document = yaml.safe_load(MANIFEST)
    spec = document["spec"]
    spec |= {"groups": GROUPS, "checkpoint": {"everySteps": 100}}
    spec["ppo"]["iterations"] = ITERATIONS
    (folder / "paced.py").write_text(paced_reward(spec, PACE_SECONDS, str(told)))
    job = parse(document)
    job = job.model_copy(update={"spec": resolve(job.spec)})
    return RenderContext(job, UID, make_plan(job.spec), OperatorSettings(pod_template=template))


def test_pods_come_go_and_die_and_the_job_completes(tmp_path: Path) -> None:
    """A pod of two ranks trains; one rollout is drained, a surplus one joins, and the trainers' pod is killed, and
    drained."""
    pace = tmp_path / "pace"
    with FakeKubelet(paced(tmp_path, pace), tmp_path) as kubelet:
        assert sorted(kubelet.pods) == ["a10-0", "a100-0", "coordinator-0", "v100-0"]
        assert kubelet.run(SECONDS, in_ppo(1)) is None
        set_pace(pace, HELD_SECONDS)
        (surplus,) = kubelet.surplus()
        kubelet.start(surplus)
        drained = kubelet.pods["v100-0"]
        assert drained.delete(grace=240) == 143
        kubelet.start("v100-0")
        kubelet.restarts.clear()
        new = {"a10-1", "a10-1-scorer"}
        assert kubelet.run(SECONDS, lambda _: new <= registered(kubelet)) is None, "the surplus rollout joins"
        set_pace(pace, PACE_SECONDS)
        assert kubelet.run(SECONDS, in_ppo(2)) is None
        kubelet.pods["a100-0"].kill()
        assert kubelet.run(SECONDS, in_ppo(3)) is None
        set_pace(pace, HELD_SECONDS)
        kubelet.pods["a100-0"].delete(grace=240)
        kubelet.start("a100-0")
        set_pace(pace, 0.0)
        assert kubelet.run(SECONDS) == 0, kubelet.pods["coordinator-0"].log.read_text()[-3000:]
        assert kubelet.restarts == ["a100-0"], "only what was killed"
    run_dir = kubelet.run_dir
    loads = [e["checkpoint_step"] for e in events(run_dir, "trainers.load") if e["stage"] == "ppo"]
    assert loads[:2] == [0, 0], "no checkpoint was due"
    assert loads[-1] >= 2, "one was written before the drained trainers ended"
    assert sorted(history(run_dir, "ppo")) == list(range(1, ITERATIONS + 1))
    assert summary(run_dir)["samples_per_second"] > 0
    retired = {e["instance"] for e in events(run_dir, "instance.health") if e["health"] == "retired"}
    assert retired == {"v100-0", "v100-0-scorer"}, "the preStop hook told the coordinator"


def registered(kubelet: FakeKubelet) -> set[str]:
    return {e["instance"] for e in events(kubelet.run_dir, "instance.registered")}
