"""A scorer's routes in the test's own process, with tiny random Llamas, and what the trainer's own code says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from torch import Tensor

from dovetail.manifest.types import ScratchModel
from dovetail.models import HuggingFaceWriter, build_stage
from dovetail.models.layers.logprobs import gather_logprobs
from dovetail.protocol.messages import ModelRef, Receive
from dovetail.protocol.wire import Arrays, pack, unpack
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring.scorer_app import ScorerService, make_app

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


def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRef]:
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


class FakeCopies:
    """A device of `room` bytes. Copies hold nonsense until something waits for them: they may still be under way."""

    def __init__(self, room: int = 2**40) -> None:
        self.room = room
        self.under_way: list[tuple[Tensor, Tensor]] = []
        self.there: list[Tensor] = []
        self.brought: list[int] = []
        self.dropped = 0

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def bring(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = {name: torch.full_like(t, float("nan")) for name, t in tensors.items()}
        self.under_way += [(copies[name], t) for name, t in tensors.items()]
        self.there += copies.values()
        self.brought.append(len(copies))
        return copies

    def arrived(self, tensors: Mapping[str, Tensor]) -> None:
        for copy, original in self.under_way:
            copy.copy_(original)
        self.under_way.clear()

    def drop(self) -> None:
        self.dropped += 1
        self.there.clear()

    def free_bytes(self) -> int:
        return self.room - sum(t.nbytes for t in self.there)


def with_client(
    body: Callable[[TestClient[Any, Any], ScorerService, FakeReceiver], Awaitable[None]],
    max_tokens: int = scoring.SCORER_TOKENS,
) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []

    async def run() -> None:
        receiver = FakeReceiver()
        scorer = scoring.ModelScorer(max_tokens=max_tokens)
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
