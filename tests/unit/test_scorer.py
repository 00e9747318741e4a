"""The scorer through its HTTP routes, with tiny random Llamas on the CPU; its numbers against the trainer's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.messages import Bucket, ModelRef, Offer, Publish, Receive, Receiver, Segment
from dovetail.api.types import ScratchModel
from dovetail.api.wire import Arrays, pack, unpack
from dovetail.models import HuggingFaceWriter, build_stage
from dovetail.rollout import scoring
from dovetail.rollout.scorer_app import ScorerService, make_app
from dovetail.rollout.weights import TransferError
from dovetail.trainer.algorithms.logprobs import gather_logprobs
from dovetail.trainer.weights import WeightSender

TOKEN = "secret"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
VOCABULARY = 97
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def ref(head: str, seed: int) -> ModelRef:
    return ModelRef(head=head, scratch=ScratchModel(config=CONFIG), seed=seed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRef]:
    """Exported models, the value heads with random weights (a scratch head is zero)."""
    result = {}
    for seed, (name, head) in enumerate(scoring.HEADS.items()):
        stage = build_stage(ref(head, seed))
        if head == "value":
            stage.score.weight.normal_(generator=torch.Generator().manual_seed(seed))
        folder = tmp_path_factory.mktemp(name)
        writer = HuggingFaceWriter(folder)
        manifest = writer.write(stage.named_parameters(), torch.float32)
        writer.finish([manifest], stage.config, stage.head, torch.float32, None)
        result[name] = ModelRef(head=stage.head, path=str(folder))
    return result


def samples(seed: int = 0, n: int = 7) -> Arrays:
    g = np.random.default_rng(seed)
    prompts = g.integers(1, 9, n).astype(np.int32)
    responses = g.integers(0, 20, n).astype(np.int32)
    responses[0] = 20
    width = int((prompts + responses).max()) + 3
    # Padding holds ids outside the vocabulary: nobody may look at them.
    tokens = np.full((n, width), 10**6, np.int32)
    for row, p, r in zip(tokens, prompts, responses, strict=True):
        row[: p + r] = g.integers(0, VOCABULARY, p + r)
    return {"tokens": tokens, "prompt_lengths": prompts, "response_lengths": responses}


class FakeReceiver:
    """Stands in for the network: yields given tensors, or fails after some."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.failure: Exception | None = None
        self.asked: list[Receive] = []

    def receive(self, receive: Receive) -> Iterator[tuple[str, torch.Tensor]]:
        self.asked.append(receive)
        yield from self.tensors
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        pass


def with_client(
    body: Callable[[TestClient[Any, Any], ScorerService, FakeReceiver], Awaitable[None]],
    max_tokens: int = scoring.MAX_TOKENS,
) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []

    async def run() -> None:
        receiver = FakeReceiver()
        scorer = scoring.Scorer(max_tokens=max_tokens)
        service = ScorerService(scorer, lambda event, **fields: events.append((event, fields)), None, receiver)
        try:
            async with TestClient(TestServer(make_app(service, TOKEN)), headers=HEADERS) as client:
                await body(client, service, receiver)
        finally:
            service.close()

    asyncio.run(run())
    return events


async def load(client: TestClient[Any, Any], models: dict[str, ModelRef]) -> None:
    body = {"models": {name: r.model_dump() for name, r in models.items()}}
    response = await client.post("/v1/load", json=body)
    assert response.status == 200, await response.text()


async def score(client: TestClient[Any, Any], arrays: Arrays, want: str, **query: str) -> Arrays:
    response = await client.post("/v1/score", params={"want": want, **query}, data=pack(arrays))
    assert response.status == 200, await response.text()
    return unpack(await response.read())


def trainers_numbers(folders: dict[str, ModelRef], arrays: Arrays, temperature: float = 1.0) -> Arrays:
    """Row by row with the trainer's model code and `gather_logprobs`."""
    prompts, responses = arrays["prompt_lengths"], arrays["response_lengths"]
    n, r_max = len(prompts), int(responses.max())
    result: Arrays = {
        "ref_logprobs": np.zeros((n, r_max), np.float32),
        "values": np.zeros((n, r_max), np.float32),
        "scores": np.zeros(n, np.float32),
    }
    stages = {name: build_stage(r) for name, r in folders.items()}
    for i, (p, r) in enumerate(zip(prompts.tolist(), responses.tolist(), strict=True)):
        tokens = torch.from_numpy(arrays["tokens"][i : i + 1, : p + r].astype(np.int64))
        logits = stages["reference"](tokens)[:, :-1]
        logprobs = gather_logprobs(logits, tokens[:, 1:], temperature)
        result["ref_logprobs"][i, :r] = logprobs[0, p - 1 :].numpy()
        result["values"][i, :r] = stages["critic"](tokens)[0, p - 1 : p + r - 1].numpy()
        result["scores"][i] = stages["reward"](tokens)[0, -1].item()
    return result


@pytest.mark.parametrize(("max_tokens", "temperature"), [(8192, 1.0), (1, 1.0), (60, 0.7)])
def test_results_equal_the_trainers(folders: dict[str, ModelRef], max_tokens: int, temperature: float) -> None:
    arrays = samples()
    expected = trainers_numbers(folders, arrays, temperature)

    async def body(client: TestClient[Any, Any], service: ScorerService, _: FakeReceiver) -> None:
        await load(client, folders)
        got = await score(client, arrays, "reference,reward,critic", temperature=str(temperature))
        assert set(got) == set(expected)
        for name, array in expected.items():
            assert got[name].dtype == np.float32
            np.testing.assert_allclose(got[name], array, atol=1e-5, rtol=0)
        assert np.abs(got["values"]).max() > 0.01
        only = await score(client, arrays, "reward")
        assert set(only) == {"scores"}

    with_client(body, max_tokens)


def test_company_changes_no_bit_of_a_samples_scores(folders: dict[str, ModelRef]) -> None:
    """Inter-stage fusion scores samples in whatever company they finish: a run must not depend on it."""
    g = np.random.default_rng(5)
    prompts, responses = g.integers(1, 40, 24).astype(np.int32), g.integers(0, 80, 24).astype(np.int32)
    prompts[0], responses[0] = 48, 80  # all of the model's positions
    tokens = g.integers(0, VOCABULARY, (24, 128)).astype(np.int32)

    def rows(chosen: list[int]) -> scoring.Samples:
        arrays = {"tokens": tokens, "prompt_lengths": prompts, "response_lengths": responses}
        return scoring.Samples.read({name: array[chosen] for name, array in arrays.items()})

    scorer = scoring.Scorer()
    scorer.load(folders)
    together = scorer.score(scoring.MODELS, rows(list(range(24))))
    for size in (1, 2, 5):
        order = g.permutation(24).tolist()
        for chunk in (order[i : i + size] for i in range(0, 24, size)):
            apart = scorer.score(scoring.MODELS, rows(chunk))
            assert together["scores"][chunk].tolist() == apart["scores"].tolist()
            for name in ("ref_logprobs", "values"):
                width = apart[name].shape[1]
                assert together[name][chunk][:, :width].tolist() == apart[name].tolist()


def test_load_replaces_the_set_and_keeps_what_is_there(folders: dict[str, ModelRef]) -> None:
    async def body(client: TestClient[Any, Any], service: ScorerService, _: FakeReceiver) -> None:
        await load(client, {"reward": folders["reward"], "critic": folders["critic"]})
        kept = service.scorer.require("critic")
        await load(client, {"critic": folders["critic"], "reference": folders["reference"]})
        assert service.scorer.require("critic") is kept
        info = await (await client.get("/v1/info")).json()
        assert set(info["models"]) == {"critic", "reference"}
        response = await client.post("/v1/score", params={"want": "reward"}, data=pack(samples()))
        assert response.status == 409
        assert "reward is not loaded" in await response.text()
        # Another folder's weights under the same name do replace it.
        await load(client, {"critic": folders["reward"]})
        assert service.scorer.require("critic") is not kept

    with_client(body)


def test_bad_requests_get_one_sentence(folders: dict[str, ModelRef], tmp_path: Path) -> None:
    good = samples()
    outside = {**good, "tokens": good["tokens"].copy()}
    outside["tokens"][0, 0] = VOCABULARY
    long = {**good, "response_lengths": good["response_lengths"] + 100}
    cases: list[tuple[dict[str, str], bytes, str]] = [
        ({}, pack(good), "say what is wanted"),
        ({"want": "reference,wisdom"}, pack(good), "wisdom"),
        ({"want": "reference", "temperature": "hot"}, pack(good), "hot"),
        ({"want": "reference", "temperature": "0"}, pack(good), "temperature"),
        ({"want": "reference"}, b"not safetensors", "safetensors"),
        ({"want": "reference"}, pack({k: good[k] for k in ("tokens", "prompt_lengths")}), "response_lengths"),
        ({"want": "reference"}, pack({**good, "prompt_lengths": 0 * good["prompt_lengths"]}), "at least 1"),
        ({"want": "reference"}, pack({**good, "tokens": good["tokens"].astype(np.float32)}), "integer"),
        ({"want": "reference"}, pack(long), "exceed the width"),
        ({"want": "reference"}, pack(outside), "vocabulary of 97"),
    ]

    async def body(client: TestClient[Any, Any], service: ScorerService, _: FakeReceiver) -> None:
        await load(client, {"reference": folders["reference"]})
        for query, data, message in cases:
            response = await client.post("/v1/score", params=query, data=data)
            text = await response.text()
            assert response.status == 400, text
            assert message in text
            assert "\n" not in text
        for models, message in (
            ({"critic": ref("lm", 0)}, "needs head 'value'"),
            ({"wisdom": ref("lm", 0)}, "wisdom"),
            ({"reward": ModelRef(head="value", path=str(tmp_path / "none"))}, "no such model folder"),
        ):
            response = await client.post("/v1/load", json={"models": {n: r.model_dump() for n, r in models.items()}})
            text = await response.text()
            assert response.status == 400, text
            assert message in text
        response = await client.post("/v1/load", json={"model": {}})
        assert response.status == 400
        assert "models" in await response.text()

    with_client(body)


def test_every_route_but_metrics_and_health_asks_for_the_token() -> None:
    async def body(client: TestClient[Any, Any], service: ScorerService, _: FakeReceiver) -> None:
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
            for method, path in (
                ("GET", "/v1/info"),
                ("POST", "/v1/load"),
                ("POST", "/v1/score"),
                ("POST", "/v1/weights"),
                ("GET", "/no/such/route"),
            ):
                assert (await client.request(method, path, headers=headers)).status == 401
            assert (await client.get("/healthz", headers=headers)).status == 200
            text = await (await client.get("/metrics", headers=headers)).text()
            assert 'dovetail_scorer_requests_total{route="/v1/score",status="401"}' in text

    with_client(body)


# ---------------------------------------------------------------- weights


def order(version: int, model: str = "critic") -> Receive:
    bucket = Bucket(names=[], dtypes=[], shapes=[], offsets=[], nbytes=0)
    segment = Segment(index=0, model=model, host="127.0.0.1", port=1, buckets=[bucket])
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


@pytest.mark.parametrize("fault", ["breaks", "lacks", "misshapen", "unknown"])
def test_an_incomplete_version_leaves_nothing_to_serve_until_the_next(folders: dict[str, ModelRef], fault: str) -> None:
    arrays = samples()
    expected = trainers_numbers({**folders, "critic": folders["reward"]}, arrays)

    async def body(client: TestClient[Any, Any], service: ScorerService, receiver: FakeReceiver) -> None:
        await load(client, {"critic": folders["critic"], "reward": folders["reward"]})
        whole = list(build_stage(folders["reward"]).named_parameters())
        before = [p.clone() for p in service.scorer.require("critic").parameters()]
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
        assert all(torch.equal(a, b) for a, b in zip(before, critic.parameters(), strict=True))
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
        self.model = {"critic": SimpleNamespace(dp_rank=0, pp_rank=0)}

    def broadcast_json(self, value: Any) -> Any:
        return value

    def gather_json(self, value: Any) -> list[Any]:
        return [value]


def test_the_trainers_own_sender_reaches_the_critic(folders: dict[str, ModelRef]) -> None:
    arrays = samples()
    expected = trainers_numbers({**folders, "critic": folders["reward"]}, arrays)["values"]
    critic = build_stage(folders["reward"])

    async def run() -> None:
        service = ScorerService(scoring.Scorer(), lambda event, **fields: None)
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


# ---------------------------------------------------------------- micro-batches


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_bound(lengths: list[int], bound: int) -> None:
    batches = scoring.micro_batches(lengths, bound)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for b in batches:
        assert len(b) == 1 or len(b) * max(lengths[i] for i in b) <= bound
    flat = [lengths[i] for b in batches for i in b]
    assert flat == sorted(flat, reverse=True)


def test_an_empty_request_has_empty_answers(folders: dict[str, ModelRef]) -> None:
    scorer = scoring.Scorer()
    scorer.load(folders)
    none = scoring.Samples(np.zeros((0, 4), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    result = scorer.score(scoring.MODELS, none)
    assert {k: v.shape for k, v in result.items()} == {"ref_logprobs": (0, 0), "scores": (0,), "values": (0, 0)}
