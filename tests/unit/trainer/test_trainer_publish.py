"""An iteration's last optimizer step, applied layer by layer as the weights leave: the same bits as at once."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dovetail.manifest.types import Stage
from dovetail.protocol.messages import Offer, Publish, Receive, Receiver
from dovetail.rollout.weight_receiver import WeightReceiver
from helpers.local_trainer import LocalTrainer
from helpers.patience import PATIENCE
from helpers.trainer_ranks import job, load_command, ppo_batch

Weights = dict[str, torch.Tensor]
EPOCHS = itertools.count(1)


@pytest.fixture(params=[{}, {"models": {"actor": {"lora": {"rank": 4}}}}], ids=["whole", "adapters"])
def trainer(request: pytest.FixtureRequest) -> Iterator[LocalTrainer]:
    spec = job().model_dump(mode="json", by_alias=True)["spec"]
    models = {"actor": {**spec["models"]["actor"], **request.param.get("models", {}).get("actor", {})}}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks run; more threads only wait for each other on matrices this small
    with LocalTrainer(job(models=models, ppo={**spec["ppo"], "ema": 0.5})) as local:
        yield local
    torch.set_num_threads(threads)


def after_step(trainer: LocalTrainer) -> None:
    trainer.metrics(load_command(Stage.PPO))
    models = ["actor", "critic"]
    trainer.metrics(trainer.step(Stage.PPO, 1, ppo_batch(1), models, 4, kl_coef=0.05))


def copies(trainer: LocalTrainer, model: str) -> Weights:
    return {name: tensor.clone() for name, tensor in trainer.runner.engine.weights(model)}


def publish(trainer: LocalTrainer, seconds: float, here: bool = True, dtype: str | None = None) -> Weights:
    """The actor as a receiver gets it."""
    offers: queue.Queue[Offer] = queue.Queue()
    trainer.client.offer = offers.put  # type: ignore[attr-defined]
    who = Receiver(name="r", kind="rollout", models=["actor"], rank_offset=1, dtype=dtype)
    command = Publish(id="publish", version=1, epoch=next(EPOCHS), receivers=[who], deadline_seconds=seconds)

    def receive() -> Weights:
        if not here:
            return {}
        message = Receive(offer=offers.get(timeout=PATIENCE), rank_offset=1, world_size=2)
        return {name: tensor.clone() for name, tensor in WeightReceiver().receive(message)}

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)
        result = trainer.execute(command)
        assert result.ok == here, result.error
        assert (result.probe is not None) == here
        trainer.probe, trainer.sent = result.probe, result.metrics  # type: ignore[attr-defined]
        return receiving.result()


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_weights_are_stepped_as_they_leave(trainer: LocalTrainer) -> None:
    engine = trainer.runner.engine
    trainer.metrics(load_command(Stage.PPO))
    start = copies(trainer, "actor")
    after_step(trainer)
    expected = {model: copies(trainer, model) for model in ("actor", "critic", "ema")}
    assert not equal(start, expected["actor"])

    after_step(trainer)
    raw = {name: p.detach().clone() for name, p in engine.models["actor"].trainable().items()}
    assert equal(publish(trainer, 60.0), expected["actor"])
    stepped = {name: p.detach() for name, p in engine.models["actor"].trainable().items()}
    assert not equal(raw, stepped), "the step was applied before its weights were asked for"
    for model, weights in expected.items():
        assert equal(copies(trainer, model), weights), model


@pytest.mark.slow
def test_the_probe_is_of_the_weights_that_left(trainer: LocalTrainer) -> None:
    """Of the step that was applied on their way, adapters merged."""
    from transformers import LlamaForCausalLM

    after_step(trainer)
    weights = publish(trainer, 60.0)
    probe = trainer.probe  # type: ignore[attr-defined]
    model = LlamaForCausalLM(trainer.runner.engine.models["actor"].config).float().eval()
    model.load_state_dict(weights)
    tokens = torch.tensor([probe.tokens])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, tokens[0, 1:].unsqueeze(1)).squeeze(1)
    assert len(set(probe.tokens)) > 10
    assert (probe.version, probe.dtype) == (1, "float32")
    assert torch.tensor(probe.logprobs).allclose(expected, atol=1e-5)
    # The same again for one that comes late, and nothing else changed by it.
    again = publish(trainer, 60.0)
    assert trainer.probe == probe  # type: ignore[attr-defined]
    assert equal(again, weights)


@pytest.mark.slow
def test_the_probe_of_a_sharded_model_gathers_a_layer_at_a_time() -> None:
    """It is taken while a vLLM server may be awake on the same GPU. What is trained afterwards is the same."""
    spec = job().model_dump(mode="json", by_alias=True)["spec"]
    models = {"actor": {**spec["models"]["actor"], "dtype": "bfloat16"}}
    with LocalTrainer(job(models=models, plan={"sharding": "Always"})) as trainer:
        after_step(trainer)
        stage = trainer.runner.engine.models["actor"].module
        layers = list(stage.body.layers.values())
        gathered: list[int] = []
        for layer in layers:
            layer.register_forward_pre_hook(
                lambda *_: gathered.append(
                    sum(not hasattr(p, "placements") for it in layers for p in [*it.parameters()][:1])
                )
            )
        publish(trainer, 60.0)
        assert trainer.probe.dtype == "bfloat16"  # type: ignore[attr-defined]
        assert len(gathered) == len(layers) > 1
        assert max(gathered) <= 1, gathered
        trainer.metrics(trainer.step(Stage.PPO, 2, ppo_batch(2), ["actor", "critic"], 4, kl_coef=0.05))
        published = copies(trainer, "actor")
        after_step(trainer)
        trainer.metrics(trainer.step(Stage.PPO, 2, ppo_batch(2), ["actor", "critic"], 4, kl_coef=0.05))
        assert equal(published, copies(trainer, "actor"))


@pytest.mark.slow
def test_weights_that_are_not_finite_are_not_served(trainer: LocalTrainer) -> None:
    after_step(trainer)
    trainer.runner.engine.settle()
    name, parameter = next(iter(trainer.runner.engine.models["actor"].trainable().items()))
    with torch.no_grad():
        parameter.fill_(float("nan"))
    who = Receiver(name="r", kind="rollout", models=["actor"], rank_offset=1)
    command = Publish(id="publish", version=1, epoch=next(EPOCHS), receivers=[who], deadline_seconds=60.0)
    offers: queue.Queue[Offer] = queue.Queue()
    trainer.client.offer = offers.put  # type: ignore[attr-defined]

    def receive() -> None:
        message = Receive(offer=offers.get(timeout=PATIENCE), rank_offset=1, world_size=2)
        list(WeightReceiver().receive(message))

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)
        result = trainer.execute(command)
        receiving.result()
    assert not result.ok, name
    assert "not finite" in (result.error or "")


@pytest.mark.slow
def test_a_publish_that_fails_leaves_the_same_weights(trainer: LocalTrainer) -> None:
    after_step(trainer)
    expected = {model: copies(trainer, model) for model in ("actor", "critic", "ema")}
    after_step(trainer)
    publish(trainer, 1.0, here=False)
    for model, weights in expected.items():
        assert equal(copies(trainer, model), weights), model


def test_matrices_travel_in_the_dtype_of_a_server(trainer: LocalTrainer) -> None:
    """They are the bits that the server would make of float32; other servers later get float32."""
    trainer.metrics(load_command(Stage.PPO))
    whole = publish(trainer, 60.0, dtype="float32")
    nbytes = trainer.sent["bytes"]  # type: ignore[attr-defined]
    half = publish(trainer, 60.0, dtype="bfloat16")
    assert equal(half, {name: x.bfloat16() if x.dim() > 1 else x for name, x in whole.items()})
    assert trainer.sent["bytes"] < 0.6 * nbytes  # type: ignore[attr-defined]
    assert equal(publish(trainer, 60.0), whole)
