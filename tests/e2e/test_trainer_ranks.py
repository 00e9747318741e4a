"""Trainer ranks as real processes: parallel layouts agree, and whatever dies, the replay ends in the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dovetail.coordinator.workers.trainer_group import CheckpointDamaged, TrainerError, TrainerLost
from dovetail.manifest.types import RLHFJob, ScratchModel, Stage
from dovetail.protocol.messages import CommandResult, Probe, Publish, Receive, Receiver, Stop
from dovetail.rollout.weight_receiver import WeightReceiver
from helpers.local_trainer import LocalTrainer
from helpers.patience import PATIENCE
from helpers.trainer_ranks import (
    TINY,
    TrainerRanks,
    dpo_batch,
    job,
    layouts,
    load_command,
    ppo_batch,
    reward_batch,
    sft_batch,
)

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "trainer-curves.json"


def curve_job() -> RLHFJob:
    import runpy

    made: RLHFJob = runpy.run_path(str(GOLDEN.with_name("make_trainer_curves.py")))["curve_job"]()
    return made


def run_curves(ranks: TrainerRanks) -> dict[str, dict[str, list[float]]]:
    """The stored curves' steps, through processes."""
    stored = json.loads(GOLDEN.read_text())
    coordinator = ranks.coordinator
    found: dict[str, dict[str, list[float]]] = {}
    makers = {
        Stage.SFT: sft_batch,
        Stage.REWARD: reward_batch,
        Stage.DPO: dpo_batch,
        Stage.PPO: lambda seed: ppo_batch(seed, ptx=6),
    }
    for stage, maker in makers.items():
        coordinator.execute(ranks.load(stage, id=f"load/{stage.value}"))
        curve = found[stage.value] = {name: [] for name in stored[stage.value]}
        steps = len(next(iter(stored[stage.value].values())))
        for step in range(1, steps + 1):
            key = f"{stage.value}/{step}"
            coordinator.batches[key] = maker(step)
            result = coordinator.execute(ranks.step(stage, step, key, kl_coef=0.05))
            for name in curve.keys() - {"evaluation"}:
                curve[name].append(result.metrics[name])
        if "evaluation" in curve:
            metrics = coordinator.execute(
                ranks.evaluate(stage, [f"{stage.value}/1", f"{stage.value}/2"], id=f"evaluate/{stage.value}")
            ).metrics
            curve["evaluation"] = [metrics["loss"], metrics.get("accuracy", 0.0)]
    return found


def check_publish(ranks: TrainerRanks, folder: Path) -> None:
    """What a receiver gets is what an export holds; a receiver that stays away fails the command, not the ranks."""
    coordinator = ranks.coordinator

    def publish(version: int, deadline: float) -> Publish:
        receiver = Receiver(name="here", kind="rollout", models=["actor"], rank_offset=1)
        return Publish(
            id=f"publish/{version}",
            version=version,
            epoch=version,
            receivers=[receiver],
            deadline_seconds=deadline,
        )

    with pytest.raises(TrainerError, match="here"):
        coordinator.execute(publish(1, 3.0))
    answers: list[CommandResult] = []
    sending = threading.Thread(target=lambda: answers.append(coordinator.execute(publish(2, 240.0))))
    sending.start()
    coordinator.wait_until(lambda: any(offer.version == 2 for offer in coordinator.offers))
    offer = next(offer for offer in coordinator.offers if offer.version == 2)
    receiver = WeightReceiver()
    got = {name: tensor.clone() for name, tensor in receiver.receive(Receive(offer=offer, rank_offset=1, world_size=2))}
    receiver.close()
    sending.join(PATIENCE)
    assert answers[0].metrics["bytes"] > 0
    coordinator.execute(ranks.export("actor", folder / "published"))
    check_probe(answers[0].probe, folder / "published")
    stored: dict[str, torch.Tensor] = {}
    for file in (folder / "published").glob("*.safetensors"):  # one of each pipeline stage
        stored |= load_file(file)
    assert got.keys() == stored.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())


def check_damage(ranks: TrainerRanks, folder: Path) -> None:
    """A flipped bit in what one rank alone wrote: all ranks refuse the checkpoint, and go on with another."""
    coordinator = ranks.coordinator
    coordinator.execute(ranks.save(folder, id="save/whole"))
    coordinator.execute(ranks.load(Stage.PPO, checkpoint=folder, id="load/whole"))
    (shard,) = folder.glob("__1_*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=f"{shard.name} is damaged"):
        coordinator.execute(ranks.load(Stage.PPO, checkpoint=folder, id="load/damaged"))
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    coordinator.execute(ranks.load(Stage.PPO, checkpoint=folder, id="load/again"))


def check_probe(probe: Probe | None, folder: Path) -> None:
    """It is what the exported model says."""
    assert probe is not None
    tokens = torch.tensor([probe.tokens])
    with torch.no_grad():
        logprobs = (
            transformers.AutoModelForCausalLM.from_pretrained(folder).float()(tokens).logits[0, :-1].log_softmax(-1)
        )
    expected = logprobs.gather(1, tokens[0, 1:].unsqueeze(1)).squeeze(1)
    assert torch.tensor(probe.logprobs).allclose(expected, atol=1e-4)


@pytest.mark.parametrize(("pp", "dp", "aggregation"), [(1, 2, "Sequence"), (2, 1, "Constant")])
def test_groups_and_aggregations_are_alike_in_all_layouts(tmp_path: Path, pp: int, dp: int, aggregation: str) -> None:
    """GRPO with its penalty in the loss: two ranks give what one gives with other micro-batches, cut by rows or by
    tokens."""
    ppo = {"advantage": "grpo", "samplesPerPrompt": 2, "lossAggregation": aggregation, "entropyCoef": 0.01}
    generation = {"maxTokens": 10}
    batch = ppo_batch(1)
    whole = load_command(Stage.PPO)
    load = whole.model_copy(update={"models": {"actor": whole.models["actor"]}})
    with LocalTrainer(job(ppo={**ppo, "microBatchSize": 8}, generation=generation)) as trainer:
        trainer.metrics(load)
        expected = trainer.metrics(trainer.step(Stage.PPO, 1, batch, ["actor"], 1, kl_coef=0.3))
    layout = {"actor": layouts(pp, dp)["actor"]}
    with TrainerRanks(tmp_path, job(ppo=ppo, generation=generation), layout) as ranks:
        ranks.coordinator.execute(load)
        ranks.coordinator.batches["ppo/1"] = batch
        by_rows = ranks.coordinator.execute(ranks.step(Stage.PPO, 1, "ppo/1", kl_coef=0.3)).metrics
        ranks.coordinator.execute(load.model_copy(update={"id": "load/again"}))
        step = ranks.step(Stage.PPO, 1, "ppo/1", kl_coef=0.3, micro_batch_tokens=40)
        by_tokens = ranks.coordinator.execute(step.model_copy(update={"id": "ppo/1/by-tokens"})).metrics
    assert expected["kl_loss"] > 0
    for found in (by_rows, by_tokens):
        for name in ("policy_loss", "kl_loss", "entropy", "actor_grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


def test_experts_are_balanced_alike_by_data_parallel_ranks(tmp_path: Path) -> None:
    """Two ranks with a micro-batch each give what one rank gives with both."""
    config = {"architecture": "qwen3_moe", "config": {**TINY.config, "num_experts": 4, "num_experts_per_tok": 2}}
    config["config"] |= {"moe_intermediate_size": 16, "head_dim": 8, "initializer_range": 0.3}
    whole = load_command(Stage.PPO)
    actor = whole.models["actor"].model_copy(update={"scratch": ScratchModel.model_validate(config)})
    load = whole.model_copy(update={"models": {"actor": actor}})
    ppo = {"advantage": "grpo", "samplesPerPrompt": 2, "microBatchSize": 4, "epochs": 1}
    balanced = job(ppo=ppo, models={"actor": {"source": {"scratch": {}}, "routerAuxLossCoef": 5.0}})
    batch = ppo_batch(1)
    with LocalTrainer(balanced) as trainer:
        trainer.metrics(load)
        expected = trainer.metrics(trainer.step(Stage.PPO, 1, batch, ["actor"], 2, kl_coef=0.3))
    with TrainerRanks(tmp_path, balanced, {"actor": layouts(1, 2)["actor"]}) as ranks:
        ranks.coordinator.execute(load)
        ranks.coordinator.batches["ppo/1"] = batch
        found = ranks.coordinator.execute(ranks.step(Stage.PPO, 1, "ppo/1", kl_coef=0.3)).metrics
    for name in ("router_aux_loss", "policy_loss", "actor_grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 1)])
def test_layouts_train_alike(tmp_path: Path, pp: int, dp: int) -> None:
    """Two ranks, data-parallel or as a pipeline, give the curves that one rank gives."""
    with TrainerRanks(tmp_path, curve_job(), layouts(pp, dp)) as ranks:
        found = run_curves(ranks)
        result = ranks.coordinator.results[-1]
        assert {span.process for span in result.spans} == {"trainer-0", "trainer-1"}
        # Messages are measured once, after the first PPO step, from each stage to the next one.
        steps = [r for r in ranks.coordinator.results if r.id.startswith("ppo/") and r.times]
        sent = [{(part.model, part.rank): part.transfer for part in r.times if part.transfer} for r in steps]
        assert sent[0].keys() == ({("actor", 0), ("critic", 0)} if pp == 2 else set())
        assert all(0 < seconds < 60 for seconds in sent[0].values())
        assert not any(sent[1:])
        check_publish(ranks, tmp_path)
        check_damage(ranks, tmp_path / "checkpoint")
    stored = json.loads(GOLDEN.read_text())
    for stage, curve in stored.items():
        for name, values in curve.items():
            # Losses are near 1; sums over ranks are rounded in another order.
            assert found[stage][name] == pytest.approx(values, rel=1e-5, abs=1e-5), f"{stage} {name}"


# ---------------------------------------------------------------- faults


def long_job() -> RLHFJob:
    """Steps of some seconds, so that a kill lands inside."""
    return job(ppo={"epochs": 24})


def fingerprint(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


class Driver:
    """Does what the coordinator's driver does: steps in order, and load + replay after a loss."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self.ranks, self.coordinator = ranks, ranks.coordinator
        self.checkpoint: tuple[int, Path] | None = None
        self.loads = 0

    def load(self) -> None:
        self.loads += 1
        path = self.checkpoint[1] if self.checkpoint else None
        self.coordinator.execute(self.ranks.load(Stage.PPO, checkpoint=path, id=f"load/{self.loads}"))

    def step(self, step: int) -> CommandResult:
        key = f"ppo/{step}"
        self.coordinator.batches[key] = ppo_batch(step)
        return self.coordinator.execute(self.ranks.step(Stage.PPO, step, key, kl_coef=0.05))

    def save(self, step: int) -> None:
        path = self.ranks.folder / "checkpoints" / f"ppo-{step}"
        path.parent.mkdir(exist_ok=True)
        self.coordinator.execute(self.ranks.save(path, id=f"save/{step}/{self.loads}"))
        self.checkpoint = (step, path)

    def reach(self, target: int) -> None:
        """Be at step `target`, whatever it takes."""
        for _ in range(10):
            try:
                position = self.coordinator.position()
                if position.stage is not Stage.PPO:
                    self.load()
                    position = self.coordinator.position()
                done = position.step
                while done < target:
                    self.step(done + 1)
                    done += 1
                return
            except TrainerLost:
                self.ranks.restart_exited()
        raise AssertionError("ten recoveries were not enough")

    def finish(self) -> dict[str, dict[str, str]]:
        hashes = {}
        for model in ("actor", "critic"):
            folder = self.ranks.folder / "models" / model
            folder.parent.mkdir(exist_ok=True)
            self.coordinator.execute(self.ranks.export(model, folder, id=f"export/{model}"))
            hashes[model] = fingerprint(folder)
        return hashes

    def stop(self) -> list[int]:
        """Exit codes of all ranks."""
        self.coordinator.execute(Stop(id="stop"))
        return [self.ranks.processes[rank].wait(PATIENCE) for rank in range(self.ranks.world_size)]


@pytest.fixture(
    scope="module",
    params=[pytest.param((1, 2), id="dp2"), pytest.param((2, 1), id="pp2")],
)
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[int, int], dict[str, dict[str, str]]]:
    """Layout, and the weights after three steps that nothing disturbed."""
    with TrainerRanks(tmp_path_factory.mktemp("undisturbed"), long_job(), layouts(*request.param)) as ranks:
        driver = Driver(ranks)
        driver.load()
        for step in (1, 2, 3):
            driver.step(step)
        hashes = driver.finish()
        assert driver.stop() == [0, 0]
    return request.param, hashes


def kill_when(ranks: TrainerRanks, rank: int, event: str, **fields: Any) -> threading.Thread:
    """In the background: SIGKILL the rank as soon as it has logged the event once more, and start it anew."""

    def count() -> int:
        return sum(r["event"] == event and all(r.get(k) == v for k, v in fields.items()) for r in ranks.log(rank))

    before = count()

    def watch() -> None:
        ranks.coordinator.wait_until(lambda: count() > before)
        ranks.replace(rank)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.nightly
def test_a_rank_killed_in_a_step_and_again_in_the_recovery(
    tmp_path: Path, undisturbed: tuple[tuple[int, int], dict[str, dict[str, str]]]
) -> None:
    layout, expected = undisturbed
    with TrainerRanks(tmp_path, long_job(), layouts(*layout)) as ranks:
        driver = Driver(ranks)
        driver.load()
        driver.step(1)
        driver.save(1)
        driver.step(2)
        survivor = ranks.processes[0].pid

        thread = kill_when(ranks, 1, "command.started", id="ppo/3/step")
        with pytest.raises(TrainerLost):
            driver.step(3)
        thread.join(PATIENCE)
        # The survivor joins again in the same process.
        again = kill_when(ranks, 1, "command.started", kind="load")
        third = kill_when(ranks, 0, "command.started", id="ppo/2/step")
        ranks.coordinator.position()
        assert ranks.processes[0].pid == survivor
        assert ranks.processes[0].poll() is None

        driver.reach(3)
        again.join(PATIENCE)
        third.join(PATIENCE)
        driver.reach(3)
        assert driver.finish() == expected
        assert driver.stop() == [0, 0]


def test_a_coordinator_that_comes_back_gets_the_result_and_the_ranks_go_on(tmp_path: Path) -> None:
    with TrainerRanks(tmp_path, long_job(), layouts(1, 2)) as ranks:
        driver, coordinator = Driver(ranks), ranks.coordinator
        driver.load()
        generation = coordinator.trainers.generation
        coordinator.batches["ppo/1"] = ppo_batch(1)

        def interrupted() -> None:
            with pytest.raises(BaseException):  # noqa: B017, PT011 - the coordinator vanishes under it
                driver.step(1)

        asking = threading.Thread(target=interrupted, daemon=True)
        asking.start()
        ranks.wait_for_event(0, "command.started", id="ppo/1/step")
        coordinator.wait_until(lambda: coordinator.asked.count("ppo/1") >= 4)  # both ranks have lengths and rows
        coordinator.stop()
        ranks.wait_for_event(0, "command.finished", id="ppo/1/step")
        coordinator.start()
        coordinator.wait_until(lambda: any(r.id == "ppo/1/step" and r.ok for r in coordinator.results))
        assert coordinator.position().step == 1
        # Asked again for what is done, the ranks hand in the same result and do not step twice.
        first = next(r for r in coordinator.results if r.id == "ppo/1/step")
        coordinator.trainers._last_result = None
        assert driver.step(1) == first
        assert coordinator.position().step == 1
        driver.step(2)
        assert coordinator.trainers.generation == generation
        assert driver.stop() == [0, 0]


def test_bad_commands_leave_the_ranks_usable_and_sigterm_ends_them(tmp_path: Path) -> None:
    with TrainerRanks(tmp_path, job(), layouts(1, 2)) as ranks:
        coordinator = ranks.coordinator
        coordinator.execute(ranks.load(Stage.SFT))
        pids = [process.pid for process in ranks.processes.values()]
        with pytest.raises(TrainerError, match="batch nowhere: HTTP 404"):
            coordinator.execute(ranks.step(Stage.SFT, 1, "nowhere"))
        coordinator.batches["odd"] = sft_batch(1, count=7)
        with pytest.raises(TrainerError, match="7 sequences cannot be split"):
            coordinator.execute(ranks.step(Stage.SFT, 1, "odd").model_copy(update={"id": "odd"}))
        with pytest.raises(TrainerError, match="step 5 cannot follow step 0"):
            coordinator.execute(ranks.step(Stage.SFT, 5, "odd"))
        coordinator.batches["good"] = sft_batch(1)
        good = ranks.step(Stage.SFT, 1, "good").model_copy(update={"id": "good"})
        stored = json.loads(GOLDEN.read_text())["sft"]["loss"][0]
        assert coordinator.execute(good).metrics["loss"] == pytest.approx(stored, abs=1e-5)
        assert [process.pid for process in ranks.processes.values() if process.poll() is None] == pids
        for process in ranks.processes.values():
            process.send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE) for process in ranks.processes.values()] == [-signal.SIGTERM] * 2


def test_an_error_on_one_rank_alone_frees_the_others_and_is_reported(tmp_path: Path) -> None:
    """Rank 1 fails where rank 0 goes on into a collective: both join again, and the second try is answered."""
    (tmp_path / "trouble.py").write_text(
        "import os\n\n\n"
        "def advantages(experience):\n"
        "    if os.environ['DOVETAIL_RANK'] == '1' and len(experience.scores) == 16:\n"
        "        raise RuntimeError('the disk with the table is gone')\n"
        "    return experience.rewards\n"
    )
    spec = job(ppo={"advantageFunction": "trouble:advantages"})
    with TrainerRanks(tmp_path, spec, layouts(1, 2), environment={"PYTHONPATH": str(tmp_path)}) as ranks:
        driver = Driver(ranks)
        driver.load()
        with pytest.raises(TrainerLost):
            driver.step(1)
        driver.load()
        with pytest.raises(TrainerError, match=r"the table is gone at .*trouble.py:6 .*\(trainer rank 1\)"):
            driver.step(1)
        left = [record["reason"] for record in ranks.log(0) if record["event"] == "generation.left"]
    assert not any("Timed out" in reason for reason in left), "freed by the failed rank, long before the deadline"


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_function_that_polls_for_ever_is_named_and_ends_the_job(tmp_path: Path, stubborn: bool) -> None:
    """It waits for a lock that nobody frees. The rank's process looks alive all the time."""
    wait = "try: time.sleep(0.01)\n        except BaseException: pass" if stubborn else "time.sleep(0.01)"
    (tmp_path / "locked.py").write_text(
        "import time\n\n\n"
        "def advantages(experience):\n"
        "    while len(experience.scores) == 16:\n"
        f"        {wait}\n"
        "    return experience.rewards\n"
    )
    spec = job(ppo={"advantageFunction": "locked:advantages", "timeoutSeconds": 2})
    told = "spec.ppo.advantageFunction: locked:advantages .*did not return within 2 s"
    with TrainerRanks(tmp_path, spec, layouts(1, 1), environment={"PYTHONPATH": str(tmp_path)}) as ranks:
        driver = Driver(ranks)
        driver.load()
        if stubborn:
            ranks.coordinator.trainers.peer_timeout = 6.0
            with pytest.raises(TrainerLost):
                driver.step(1)
            assert ranks.processes[0].wait(PATIENCE) == 2
            assert re.search(told, (tmp_path / "rank-0.log").read_text().splitlines()[-1])
        else:
            with pytest.raises(TrainerError, match=f"{told}.* at .*locked.py:6 in advantages"):
                driver.step(1)


def test_an_absent_coordinator_ends_the_rank_with_a_sentence(tmp_path: Path) -> None:
    ranks = TrainerRanks(tmp_path, job(), layouts(1, 2), patience=0.5)
    ranks.coordinator.stop()
    try:
        ranks.start(0)
        assert ranks.processes[0].wait(PATIENCE) == 1
        last = ranks.log(0)[-1]
        assert last["event"] == "rank.failed"
        assert "did not answer /v1/trainer/join" in last["message"]
    finally:
        ranks.coordinator.start()
        ranks.__exit__()


def test_a_frozen_rank_does_not_hold_the_others_for_ever(tmp_path: Path) -> None:
    """SIGSTOP instead of SIGKILL: connections stand, so only the heartbeat shows it."""
    with TrainerRanks(tmp_path, long_job(), layouts(1, 2)) as ranks:
        driver = Driver(ranks)
        driver.load()
        driver.step(1)
        driver.save(1)
        ranks.coordinator.trainers.peer_timeout = 6.0
        frozen = ranks.processes[1].pid

        def freeze() -> None:
            ranks.wait_for_event(1, "command.started", id="ppo/2/step")
            os.kill(frozen, signal.SIGSTOP)

        thread = threading.Thread(target=freeze)
        thread.start()
        with pytest.raises(TrainerLost):
            driver.step(2)
        thread.join(PATIENCE)
        ranks.coordinator.trainers.peer_timeout = 240.0
        # What a launcher does with a process that is not ready: end it, start another.
        ranks.kill(1)
        ranks.restart_exited()
        driver.reach(2)
        assert driver.stop() == [0, 0]
