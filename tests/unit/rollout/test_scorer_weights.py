"""New weights for a scorer's critic, from a stand-in and from the trainer's own sender."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

from dovetail.models import build_stage
from dovetail.models.links.deadline import TransferError
from dovetail.protocol.messages import Bucket, ModelRef, Offer, Publish, Receive, Receiver, Segment
from dovetail.protocol.wire import pack
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring.scorer_app import ScorerService, make_app
from dovetail.trainer.weight_sender import WeightSender
from helpers.scorers import (
    HEADERS,
    TOKEN,
    FakeReceiver,
    exported,
    load,
    samples,
    score,
    trainers_numbers,
    with_client,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRef]:
    return exported(tmp_path_factory)


def order(version: int, model: str = "critic") -> Receive:
    bucket = Bucket(names=[], dtypes=[], shapes=[], offsets=[], nbytes=0)
    segment = Segment(index=0, model=model, host="127.0.0.1", port=1, secret="s", buckets=[bucket])
    other = segment.model_copy(update={"model": "actor"})
    offer = Offer(version=version, epoch=1, backend="gloo", segments=[other, segment])
    return Receive(offer=offer, rank_offset=1, world_size=2)


async def send(client: TestClient[Any, Any], receive: Receive) -> tuple[int, str]:
    response = await client.post("/v1/weights", data=receive.model_dump_json())
    return response.status, await response.text()


def test_a_complete_version_becomes_the_critics(folders: dict[str, ModelRef]) -> None:
    arrays = samples()
    expected = trainers_numbers({**folders, "critic": folders["reward"]}, arrays)

    async def body(client: TestClient[Any, Any], service: ScorerService, receiver: FakeReceiver) -> None:
        await load(client, {"critic": folders["critic"]})
        receiver.tensors = list(build_stage(folders["reward"]).named_parameters())
        assert (await send(client, order(5)))[0] == 200
        assert [s.model for s in receiver.asked[0].offer.segments] == ["critic"]
        got = await score(client, arrays, "critic")
        np.testing.assert_allclose(got["values"], expected["values"], atol=1e-5, rtol=0)
        assert (await (await client.get("/v1/info")).json())["weight_version"] == 5
        assert "dovetail_scorer_weight_version 5.0" in await (await client.get("/metrics")).text()
        # Loading the same critic again keeps what arrived.
        await load(client, {"critic": folders["critic"]})
        assert service.scorer.critic_version == 5

    with_client(body)


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float32])
def test_a_float16_critic_takes_the_weights_of_a_trainer_in_another_dtype(
    folders: dict[str, ModelRef], sent: torch.dtype
) -> None:
    scorer = scoring.ModelScorer("cpu", torch.float16)
    scorer.load({"critic": folders["critic"]})
    came = {name: p.detach().to(sent) for name, p in build_stage(folders["reward"]).named_parameters()}
    scorer.apply_weights(scorer.stage_weights(came.items()), 5)
    held = dict(scorer._models["critic"].named_parameters())
    assert set(held) == set(came)
    for name, tensor in came.items():
        assert torch.equal(held[name], tensor.to(torch.float16)), name
    assert scorer.critic_version == 5


@pytest.mark.parametrize("fault", ["breaks", "lacks", "misshapen", "unknown"])
def test_an_incomplete_version_leaves_nothing_to_serve_until_the_next(folders: dict[str, ModelRef], fault: str) -> None:
    arrays = samples()
    expected = trainers_numbers({**folders, "critic": folders["reward"]}, arrays)

    async def body(client: TestClient[Any, Any], service: ScorerService, receiver: FakeReceiver) -> None:
        await load(client, {"critic": folders["critic"], "reward": folders["reward"]})
        whole = list(build_stage(folders["reward"]).named_parameters())
        before = [p.clone() for _, p in service.scorer.require("critic").named_parameters()]
        receiver.tensors, message = whole[:-1], "did not come"
        if fault == "breaks":
            receiver.failure, message = TransferError("the checksum is wrong"), "checksum"
        elif fault == "misshapen":
            receiver.tensors, message = [(whole[0][0], torch.zeros(1))], "shape"
        elif fault == "unknown":
            receiver.tensors, message = [("nobody", torch.zeros(1))], "no such tensor"
        critic = service.scorer.require("critic")
        status, text = await send(client, order(6))
        assert status == (502 if fault == "breaks" else 400)
        assert message in text
        assert all(torch.equal(a, b) for a, b in zip(before, (p for _, p in critic.named_parameters()), strict=True))
        refused = await client.post("/v1/score", params={"want": "critic"}, data=pack(arrays))
        assert refused.status == 409
        assert "complete version" in await refused.text()
        assert "scores" in await score(client, arrays, "reward")
        receiver.tensors, receiver.failure = whole, None
        assert (await send(client, order(7)))[0] == 200
        got = await score(client, arrays, "critic")
        np.testing.assert_allclose(got["values"], expected["values"], atol=1e-5, rtol=0)

    events = with_client(body)
    assert "weights.applied" in [name for name, _ in events]


class OneRank:
    """The trainer's process groups of a single rank."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self) -> None:
        self.model = {"critic": SimpleNamespace(dp_rank=0, pp_rank=0, tp_rank=0)}

    def broadcast_json(self, value: Any) -> Any:
        return value

    def gather_json(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_the_trainers_own_sender_reaches_the_critic(folders: dict[str, ModelRef], devices: list[str]) -> None:
    arrays = samples()
    expected = trainers_numbers({**folders, "critic": folders["reward"]}, arrays)["values"]
    critic = build_stage(folders["reward"])

    async def run() -> None:
        service = ScorerService(scoring.ModelScorer(devices), lambda event, **fields: None)
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Task[tuple[int, str]]] = []
        try:
            async with TestClient(TestServer(make_app(service, TOKEN)), headers=HEADERS) as client:
                await load(client, {"critic": folders["critic"]})

                def tell(offer: Offer) -> None:
                    receive = Receive(offer=offer, rank_offset=1, world_size=2)
                    loop.call_soon_threadsafe(lambda: answers.append(asyncio.create_task(send(client, receive))))

                sender = WeightSender(OneRank(), tell, host="127.0.0.1", bucket_bytes=4096)
                takers = [Receiver(name="s", kind="scorer", models=["critic"], rank_offset=1)]
                for version, factor in ((1, 1.0), (2, 2.0)):
                    critic.score.weight.mul_(factor)
                    command = Publish(id="p", version=version, epoch=1, receivers=takers, deadline_seconds=60)
                    await asyncio.to_thread(sender.publish, command, {"critic": critic.named_parameters})
                    assert await answers[-1] == (200, f'{{"version": {version}}}')
                    got = await score(client, arrays, "critic")
                    np.testing.assert_allclose(got["values"], factor * expected, atol=1e-5, rtol=0)
                sender.close()
        finally:
            service.close()

    asyncio.run(run())


def test_weights_without_a_critic_or_a_segment_are_refused(folders: dict[str, ModelRef]) -> None:
    async def body(client: TestClient[Any, Any], service: ScorerService, receiver: FakeReceiver) -> None:
        assert (await send(client, order(1)))[0] == 409
        assert (await send(client, order(1, model="actor")))[0] == 400
        await load(client, {"critic": folders["critic"]})
        assert "values" in await score(client, samples(), "critic")

    with_client(body)
