"""The real process of a trainer rank on the null GPU, started as its pod starts it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from safetensors import safe_open

from dovetail.launch.liveness import LivenessLimits
from dovetail.manifest.types import Stage
from dovetail.pod.main import Pod, pod_processes
from dovetail.protocol.messages import Stop
from dovetail.protocol.plan import Plan, TrainerRank
from helpers.fake_coordinator import FakeCoordinator
from helpers.patience import PATIENCE
from helpers.trainer_ranks import TrainerRanks, job, layouts, ppo_batch, reward_batch, sft_batch

pytestmark = pytest.mark.slow

A100 = {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 2}
GROUPS = [{"name": "trainers", "roles": ["trainer"], "gpu": A100}, {"name": "r", "roles": ["rollout"], "gpu": A100}]


class PodOfRanks(TrainerRanks):
    """The ranks as the processes of one pod, each with a GPU of its own."""

    def __enter__(self) -> PodOfRanks:
        ranks = [TrainerRank(rank=r, name=f"trainer-{r}", group="trainers") for r in range(self.world_size)]
        plan = Plan.model_validate_json((self.folder / "plan.json").read_bytes()).model_copy(update={"trainers": ranks})
        base = self.process_env("pod", 0)
        group = self.job.spec.groups[0]
        processes = pod_processes(self.job, plan, group, 0, base, ["3", "5"], threads=1)
        self.pod = Pod(processes, self._environment, limits=LivenessLimits.of(60))
        self.code: int | None = None
        self._thread = threading.Thread(target=lambda: setattr(self, "code", self.pod.run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pod.stop()
        self._thread.join(PATIENCE)
        self.coordinator.close()

    def stop(self) -> int | None:
        """The pod's exit code after the command that ends the ranks."""
        threading.Thread(target=self.coordinator.execute, args=(Stop(id="stop"),), daemon=True).start()
        self._thread.join(PATIENCE)
        return self.code


def test_a_pod_of_two_ranks_trains_all_stages(
    null_gpu_environment: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two pipeline stages: SFT, reward model and PPO, with evaluation, checkpoint, export and a new start from it."""
    environment = {**null_gpu_environment, "NULLGPU_MEETINGS": str(tmp_path / "meetings")}
    ranks = PodOfRanks(
        tmp_path, job(groups=GROUPS, trainer={"compile": "Never"}), layouts(pp=2), environment=environment
    )
    coordinator: FakeCoordinator = ranks.coordinator
    with ranks:
        for stage, batch in ((Stage.SFT, sft_batch(1)), (Stage.REWARD, reward_batch(1)), (Stage.PPO, ppo_batch(1))):
            key = stage.value
            coordinator.batches[key] = batch
            coordinator.execute(ranks.load(stage, id=f"load/{stage.value}"))
            coordinator.execute(ranks.step(stage, 1, key))
            if stage is not Stage.PPO:
                coordinator.execute(ranks.evaluate(stage, [key], id=f"evaluate/{stage.value}"))
        coordinator.execute(ranks.save(tmp_path / "checkpoint"))
        for model in ("actor", "critic"):
            coordinator.execute(ranks.export(model, tmp_path / model, id=f"export/{model}"))
        coordinator.execute(ranks.load(Stage.PPO, checkpoint=tmp_path / "checkpoint", id="load/again"))
        result = coordinator.execute(ranks.step(Stage.PPO, 2, "ppo"))
        assert result.metrics["optimizer_steps"] == 4
        assert {(t.model, t.rank) for t in result.times} == {(m, r) for m in ("actor", "critic") for r in (0, 1)}
        assert ranks.stop() == 0, capfd.readouterr().out[-5000:]
    assert list((tmp_path / "meetings").iterdir()), "the ranks met over NCCL"
    assert len(tensors(tmp_path / "actor")) == len(set(tensors(tmp_path / "actor"))) == 21


def tensors(folder: Path) -> list[str]:
    """The names in all files of an export."""
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            names += file.keys()
    return names
