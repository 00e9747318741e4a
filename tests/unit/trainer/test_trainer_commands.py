"""Commands on a trainer of one rank: what succeeds, what is refused, and what stays usable afterwards."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.coordinator.schedules.step_commands import optimizer_steps
from dovetail.manifest.resolve import old_is_current
from dovetail.manifest.types import Stage
from dovetail.models.layers.predictions import by_chunks
from dovetail.protocol.messages import Action, Export, Save
from dovetail.protocol.wire import pack, unpack
from dovetail.trainer.command_errors import is_peer_loss, sentence
from dovetail.trainer.communication.groups import PeerLost, RankFailed
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.engine.optim import learning_rate
from dovetail.trainer.steps.experience_batch import PPOSamples
from dovetail.trainer.steps.ppo_step import before_step
from helpers.local_trainer import LocalTrainer
from helpers.patience import PATIENCE
from helpers.trainer_ranks import job, load_command, ppo_batch, sft_batch


@pytest.fixture
def trainer() -> Iterator[LocalTrainer]:
    with LocalTrainer(job()) as local:
        yield local


def sft_step(trainer: LocalTrainer, step: int, batch: bytes | None = None):  # type: ignore[no-untyped-def]
    return trainer.step(Stage.SFT, step, sft_batch(step) if batch is None else batch, ["actor"], 4)


def test_refused_commands_change_nothing(trainer: LocalTrainer) -> None:
    t = trainer
    refused = t.execute(sft_step(t, 1))
    assert (refused.ok, refused.error) == (False, "nothing is loaded; send `load` first")
    t.metrics(load_command(Stage.SFT))
    expected = t.metrics(sft_step(t, 1))["loss"]

    t.metrics(load_command(Stage.SFT))
    tokens = unpack(sft_batch(1))
    too_large = {**tokens, "tokens": tokens["tokens"] + 64}
    no_mask = {name: array for name, array in tokens.items() if name != "loss_mask"}
    unmarked = {**tokens, "loss_mask": np.zeros_like(tokens["loss_mask"])}
    missing = sft_step(t, 1).model_copy(update={"batch": "nowhere"})
    for command, message in [
        (sft_step(t, 1, pack(too_large)), "has a vocabulary of 64"),
        (sft_step(t, 1, pack(no_mask)), "no array 'loss_mask'"),
        (sft_step(t, 1, pack(unmarked)), "no token to learn"),
        (sft_step(t, 1, b"not a document"), "is not a valid safetensors document"),
        (sft_step(t, 1, sft_batch(1, count=6)), "runs 4 F of actor, the batch makes 3"),
        (sft_step(t, 1, sft_batch(1, count=7)), "7 sequences cannot be split"),
        (sft_step(t, 2), "step 2 cannot follow step 0"),
        (missing, "batch nowhere: HTTP 404"),
        (t.step(Stage.PPO, 1, ppo_batch(1), ["actor", "critic"], 4), "is for stage ppo, the ranks hold sft"),
        (Export(id="e", model="ema", path="/nowhere/x"), "set ppo.ema"),
        (Export(id="e", model="critic", path="/nowhere/x"), "'critic' is not loaded"),
    ]:
        result = t.execute(command)
        assert not result.ok
        assert result.error is not None
        assert message in result.error
    assert (t.runner.stage, t.runner.step) == (Stage.SFT, 0)
    assert t.metrics(sft_step(t, 1))["loss"] == expected


def test_the_next_batch_is_fetched_while_a_step_runs(trainer: LocalTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    t, asked, given = trainer, queue.Queue[tuple[str, bool]](), trainer.client.batch

    def batch(key: str, *arguments: object, **more: object) -> bytes:
        asked.put((key, threading.current_thread() is threading.main_thread()))
        return given(key)

    monkeypatch.setattr(t.client, "batch", batch)
    t.metrics(load_command(Stage.SFT))
    first, second, last = (sft_step(t, step) for step in (1, 2, 8))
    assert last.step == load_command(Stage.SFT).total_steps
    alone = [t.metrics(each)["loss"] for each in (first, second)]
    seen = [asked.get(timeout=PATIENCE) for _ in range(3)]
    assert seen == [("sft/1", True), ("sft/2", False), ("sft/3", False)]

    t.metrics(load_command(Stage.SFT))
    assert t.metrics(first)["loss"] == alone[0]
    assert [asked.get(timeout=PATIENCE) for _ in range(2)] == [("sft/1", True), ("sft/2", False)]
    assert t.metrics(second)["loss"] == alone[1]
    # There was no third batch, so the step asks again.
    assert asked.get(timeout=PATIENCE) == ("sft/3", False)
    t.metrics(sft_step(t, 3))
    assert asked.get(timeout=PATIENCE) == ("sft/3", True)


def test_out_of_memory_names_the_micro_batch_size(trainer: LocalTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.metrics(load_command(Stage.SFT))

    def run(self: Engine, *_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", run)
        result = trainer.execute(sft_step(trainer, 1))
    assert result.error == (
        "out of memory while running sft/1/step: lower sft.microBatchSize (now 2), set plan.recompute to Always, or "
        "spread the model over more ranks"
    )
    # The step broke off half-way: what is held must be loaded again.
    assert trainer.runner.stage is None
    again = trainer.execute(sft_step(trainer, 1))
    assert again.error == "the last step broke off half-way; send `load` first"
    trainer.metrics(load_command(Stage.SFT))
    trainer.metrics(sft_step(trainer, 1))


def test_a_load_that_fails_leaves_nothing_loaded(trainer: LocalTrainer, tmp_path: Path) -> None:
    command = load_command(Stage.SFT)
    ref = command.models["actor"].model_copy(update={"scratch": None, "path": str(tmp_path / "none")})
    result = trainer.execute(command.model_copy(update={"models": {"actor": ref}}))
    assert not result.ok
    assert "no such model folder" in str(result.error)
    assert trainer.runner.stage is None
    trainer.metrics(load_command(Stage.SFT))


def test_checkpoint_and_export_fail_with_a_sentence(trainer: LocalTrainer, tmp_path: Path) -> None:
    trainer.metrics(load_command(Stage.SFT))
    (tmp_path / "file").write_text("")
    result = trainer.execute(Save(id="s", path=str(tmp_path / "file" / "checkpoint")))
    assert not result.ok
    assert "\n" not in str(result.error)
    # Nothing that training needs was touched.
    assert trainer.runner.stage is Stage.SFT
    trainer.metrics(sft_step(trainer, 1))


def test_a_command_that_failed_on_one_rank_alone_is_answered_the_second_time(trainer: LocalTrainer) -> None:
    trainer.failed["load"] = "out of memory while running load"
    result = trainer.execute(load_command(Stage.SFT))
    assert (result.ok, result.error) == (False, "out of memory while running load")
    trainer.metrics(load_command(Stage.SFT))


def test_results_carry_a_timeline(trainer: LocalTrainer) -> None:
    trainer.metrics(load_command(Stage.SFT))
    spans = trainer.execute(sft_step(trainer, 1)).spans
    names = [span.name for span in spans]
    assert "sft/1/step" in names
    assert "sft step" in names
    assert {f"actor {kind}{i}" for kind in "FB" for i in range(4)} <= set(names)
    assert all(span.end >= span.start and span.process == "trainer-0" for span in spans)


# ---------------------------------------------------------------- PPO


def ppo_step(trainer: LocalTrainer, models: list[str], batch: bytes | None = None, **fields: object):  # type: ignore[no-untyped-def]
    step = trainer.runner.step + 1
    return trainer.step(Stage.PPO, step, ppo_batch(step) if batch is None else batch, models, 4, kl_coef=0.05, **fields)


def parameters(trainer: LocalTrainer, model: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.runner.engine.weights(model)}


def unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_critic_warm_up_leaves_the_actor_alone(trainer: LocalTrainer) -> None:
    trainer.metrics(load_command(Stage.PPO))
    actor, critic = parameters(trainer, "actor"), parameters(trainer, "critic")
    metrics = trainer.metrics(ppo_step(trainer, ["actor", "critic"], train_actor=False))
    assert unchanged(actor, parameters(trainer, "actor"))
    assert not unchanged(critic, parameters(trainer, "critic"))
    assert "policy_loss" not in metrics
    assert metrics["critic_grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("schedule", ["Constant", "Linear", "Cosine"])
def test_the_actors_schedule_is_whole_after_the_critics_warm_up(schedule: str, extended: bool) -> None:
    """The actor's rates are those of a run of its own iterations alone, also where the run got more of them later."""
    optimizer = {"learningRate": 1e-3, "schedule": schedule, "warmupFraction": 0.25}
    ppo = {"iterations": 6, "criticWarmupIterations": 2, "miniBatchSize": 16, "epochs": 1, "actorOptimizer": optimizer}
    spec = job(ppo=ppo).spec
    later = {"total_steps": 8, "warmup_total": 6} if extended else {}
    rates, critics = [], []
    with LocalTrainer(job(ppo=ppo)) as trainer:
        trainer.metrics(load_command(Stage.PPO, total_steps=optimizer_steps(spec)))
        for iteration in range(1, 9 if extended else 7):
            own = {**later, "train_actor": iteration > 2}
            batch, models = ppo_batch(1), ["actor", "critic"]
            found = trainer.metrics(trainer.step(Stage.PPO, iteration, batch, models, 8, kl_coef=0.05, **own))
            critics.append(found["critic_learning_rate"])
            if "actor_learning_rate" in found:
                rates.append(found["actor_learning_rate"])
    count, config = 6 if extended else 4, spec.ppo.actor_optimizer
    assert rates == pytest.approx([learning_rate(step, count, config, warmup_total=4) for step in range(count)])
    assert rates[0] == 1e-3, "a quarter of the actor's four steps is one step"
    assert rates[-1] == 1e-3 if schedule == "Constant" else rates[-1] < 0.35e-3
    assert len(critics) == count + 2


@pytest.mark.slow
def test_a_list_of_several_mini_batches_trains_the_same(trainer: LocalTrainer) -> None:
    """The critic one mini-batch ahead, backwards split: weights and metrics of one mini-batch after another."""
    trainer.metrics(load_command(Stage.PPO))
    plain = trainer.execute(ppo_step(trainer, ["actor", "critic"]))
    after = {model: parameters(trainer, model) for model in ("actor", "critic")}
    trainer.metrics(load_command(Stage.PPO))
    step = ppo_step(trainer, ["actor", "critic"])

    def part(model: str, kinds: str, start: int) -> list[Action]:
        return [Action(model=model, micro_batch=i, kind=k) for i in range(start, start + 4) for k in kinds]  # type: ignore[arg-type]

    ahead = part("critic", "FB", 0) + part("critic", "F", 4) + part("actor", "FIW", 0) + part("critic", "I", 4)
    rest = part("actor", "F", 4) + part("critic", "W", 4) + part("actor", "B", 4)
    rolled = trainer.execute(step.model_copy(update={"actions": [ahead + rest], "mini_batches": 2}))
    assert rolled.ok, rolled.error
    for model, weights in after.items():
        assert unchanged(weights, parameters(trainer, model))
    timing = {"seconds", "activation_peak_bytes"}
    for name in plain.metrics.keys() - timing:
        assert rolled.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-6), name
    measured = {part.model: part for part in rolled.times}
    assert {kind: len(values) for kind, values in measured["actor"].seconds.items()} == dict.fromkeys("FBIW", 4)
    assert all(size > 0 for size in measured["critic"].activation)
    assert rolled.metrics["activation_peak_bytes"] > plain.metrics["activation_peak_bytes"]

    refused = trainer.execute(ppo_step(trainer, ["actor", "critic"]).model_copy(update={"mini_batches": 3}))
    assert refused.error == "a schedule of 3 mini-batches cannot be repeated for 4 optimizer steps"


@pytest.mark.slow
def test_the_ratio_is_one_at_the_weights_that_sampled() -> None:
    ppo = {"miniBatchSize": 16, "epochs": 1, "microBatchSize": 4}
    with LocalTrainer(job(ppo=ppo)) as trainer:
        trainer.metrics(load_command(Stage.PPO))
        metrics = trainer.metrics(ppo_step(trainer, ["actor", "critic"]))
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clipfrac"] == 0.0
    assert metrics["optimizer_steps"] == 1


@pytest.mark.slow
def test_the_size_of_micro_batches_changes_nothing_but_rounding() -> None:
    """With samples without a response among them: alone, they make a micro-batch that nothing is learnt from."""
    arrays = unpack(ppo_batch(1, ptx=6))
    arrays["response_lengths"][[1, 6, 7]] = 0
    found = []
    for size in (1, 2, 8):
        ppo = {"miniBatchSize": 8, "epochs": 1, "microBatchSize": size, "entropyCoef": 0.1, "ptxCoef": 0.5}
        with LocalTrainer(job(ppo=ppo)) as trainer:
            trainer.metrics(load_command(Stage.PPO))
            step = trainer.step(Stage.PPO, 1, pack(arrays), ["actor", "critic"], 8 // size)
            metrics = trainer.metrics(step)
        found.append({k: v for k, v in metrics.items() if k not in ("seconds", "activation_peak_bytes")})
    assert found[0]["policy_loss"] != 0
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_group_baselines_need_no_critic(advantage: str) -> None:
    arrays = unpack(ppo_batch(1))
    del arrays["values"]
    with LocalTrainer(job(ppo={"advantage": advantage})) as trainer:
        load = load_command(Stage.PPO)
        trainer.metrics(load.model_copy(update={"models": {"actor": load.models["actor"]}}))
        metrics = trainer.metrics(ppo_step(trainer, ["actor"], pack(arrays)))
    assert metrics["actor_grad_norm"] > 0
    assert "value_loss" not in metrics


@pytest.mark.slow
def test_importance_weights_compare_the_distributions_that_were_sampled_from() -> None:
    """The rollouts' log-probabilities are those of the logits divided by the temperature, and so are the trainer's."""
    arrays, found = unpack(ppo_batch(1)), {}
    for temperature in (1.0, 0.5):
        with LocalTrainer(job(generation={"temperature": temperature})) as trainer:
            trainer.metrics(load_command(Stage.PPO))
            samples = PPOSamples.read(arrays, trainer.job.spec.ppo)
            own, _ = before_step(trainer.runner._context, samples, None)
            sampled = pack({**arrays, "rollout_logprobs": own.numpy()})
            found[temperature] = trainer.metrics(ppo_step(trainer, ["actor", "critic"], sampled))
            assert found[temperature]["mismatch_abs"] == pytest.approx(0.0, abs=1e-6)
            assert found[temperature]["mismatch_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert found[0.5]["kl"] != pytest.approx(found[1.0]["kl"], abs=1e-2), "the penalty is at the sampling temperature"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("kl", [{"coef": 0.05}, {"coef": 0.0}])
def test_a_single_step_uses_its_own_pass_for_the_old_log_probabilities(
    loss: str, kl: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step as with a forward pass before it."""
    ppo = {"advantage": "grpo", "samplesPerPrompt": 4, "miniBatchSize": 16, "epochs": 1, "kl": kl, "loss": loss}
    ppo |= {"lossAggregation": "Sequence", "oldLogProbs": "Recompute"}
    found = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr("dovetail.trainer.steps.ppo_step.old_is_current", lambda spec: False)
        with LocalTrainer(job(ppo=ppo, generation={"temperature": 0.7})) as trainer:
            load = load_command(Stage.PPO)
            trainer.metrics(load.model_copy(update={"models": {"actor": load.models["actor"]}}))
            result = trainer.execute(trainer.step(Stage.PPO, 1, ppo_batch(1), ["actor"], 8, kl_coef=kl["coef"]))
            assert result.ok, result.error
            assert ("old log-probabilities" in [span.name for span in result.spans]) is not own
            found.append((result.metrics, parameters(trainer, "actor")))
    (mine, weights), (before, expected) = found
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6)
    for name in ("policy_loss", "ratio", "actor_grad_norm", "mismatch_abs", "mismatch_kl", "mismatch_capped"):
        assert mine[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6), name
    assert mine["mismatch_abs"] > 0.01, "weights of importance sampling have something to do"


@pytest.mark.parametrize(
    ("ppo", "spared"),
    [
        ({}, True),
        ({"kl": {"in": "Reward"}}, False),
        ({"kl": {"in": "Reward", "coef": 0}}, True),
        ({"epochs": 2}, False),
        ({"miniBatchSize": 8}, False),
        ({"lag": 1}, False),
        ({"advantage": "distillation", "kl": {"coef": 0}}, False),
        ({"advantage": "gae"}, False),
        ({"advantageFunction": "a:b"}, False),
    ],
)
def test_what_needs_the_old_log_probabilities_before_the_step(ppo: dict[str, object], spared: bool) -> None:
    one = {"advantage": "grpo", "samplesPerPrompt": 4, "miniBatchSize": 16, "epochs": 1}
    assert old_is_current(job(ppo={**one, **ppo}).spec) is spared


@pytest.mark.slow
@pytest.mark.parametrize("place", ["Loss", "Reward"])
def test_without_a_penalty_no_reference_is_needed_and_the_weights_are_the_same(place: str) -> None:
    whole = unpack(ppo_batch(1))
    lacking = {name: array for name, array in whole.items() if name != "ref_logprobs"}
    kl = {"coef": 0, "in": place}
    found = []
    for arrays in (whole, lacking):
        with LocalTrainer(job(ppo={"advantage": "rloo", "samplesPerPrompt": 4, "kl": kl})) as trainer:
            load = load_command(Stage.PPO)
            trainer.metrics(load.model_copy(update={"models": {"actor": load.models["actor"]}}))
            step = trainer.step(Stage.PPO, 1, pack(arrays), ["actor"], 4)
            found.append((trainer.metrics(step), parameters(trainer, "actor")))
    (with_it, weights), (without, same) = found
    assert unchanged(weights, same)
    assert {"kl", "kl_ci95"} <= with_it.keys()
    assert not {"kl", "kl_ci95", "kl_loss"} & without.keys()
    with LocalTrainer(job(ppo={"kl": {"coef": 0.1}})) as trainer:
        trainer.metrics(load_command(Stage.PPO))
        refused = trainer.execute(trainer.step(Stage.PPO, 1, pack(lacking), ["actor", "critic"], 4, kl_coef=0.1))
    assert "no array 'ref_logprobs'" in str(refused.error)


@pytest.mark.slow
def test_a_step_without_the_whole_logits_changes_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs compute it: old log-probabilities, loss, entropy bonus and demonstrations."""
    changed = {"generation": {"temperature": 0.7}, "ppo": {"entropyCoef": 0.05, "ptxCoef": 0.5}}
    chunked = partial(by_chunks, chunk=4 * 64 * 5)
    found = []
    for whole in (True, False):
        if not whole:
            monkeypatch.setattr("dovetail.models.model_stage.predict", chunked)
        with LocalTrainer(job(**changed)) as trainer:
            trainer.metrics(load_command(Stage.PPO))
            steps = [trainer.metrics(ppo_step(trainer, ["actor", "critic"], ppo_batch(1, ptx=8))) for _ in range(2)]
            found.append([step for step in steps if step.pop("seconds") and step.pop("activation_peak_bytes")])
    assert len(found[0]) == 2
    for mine, expected in zip(found[1], found[0], strict=True):
        assert mine == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_ptx_pulls_the_actor_towards_the_demonstrations() -> None:
    losses = {}
    for coef in (0.0, 5.0):
        with LocalTrainer(job(ppo={"ptxCoef": coef})) as trainer:
            trainer.metrics(load_command(Stage.PPO))
            for _ in range(6):
                trainer.metrics(ppo_step(trainer, ["actor", "critic"], ppo_batch(1, ptx=8)))
            demonstrations = unpack(ppo_batch(1, ptx=8))
            tokens = torch.from_numpy(demonstrations["ptx_tokens"]).long()
            with torch.no_grad():
                logits = trainer.runner.engine.models["actor"].module(tokens)
            lengths = torch.from_numpy(demonstrations["ptx_lengths"])
            keep = torch.arange(1, tokens.shape[1]) < lengths.unsqueeze(1)
            found = torch.nn.functional.cross_entropy(logits[:, :-1][keep], tokens[:, 1:][keep])
            losses[coef] = found.item()
    assert losses[5.0] < losses[0.0] - 0.5


def test_a_missing_critic_value_is_refused_before_anything_moves(trainer: LocalTrainer) -> None:
    trainer.metrics(load_command(Stage.PPO))
    arrays = unpack(ppo_batch(1))
    del arrays["values"]
    result = trainer.execute(ppo_step(trainer, ["actor", "critic"], pack(arrays)))
    assert "no array 'values'" in str(result.error)
    trainer.metrics(ppo_step(trainer, ["actor", "critic"]))


# ---------------------------------------------------------------- errors


def test_transport_errors_are_told_from_the_job_s_own() -> None:
    closed = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26846"
    assert is_peer_loss(RuntimeError(closed))
    assert is_peer_loss(PeerLost("x"))
    assert not is_peer_loss(RankFailed("could not restore: connection settings are missing"))
    assert not is_peer_loss(RuntimeError("cannot restore: a socket wrench is missing"))
    assert not is_peer_loss(OSError(28, "No space left on device"))
    assert sentence(OSError(28, "No space left on device")) == "OSError: [Errno 28] No space left on device"
