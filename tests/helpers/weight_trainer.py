"""A trainer of one rank that sends weights to real vLLM servers, with the coordinator's part of it."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import aiohttp
import torch

from dovetail.coordinator.workers import publishing
from dovetail.coordinator.workers.offers import ReceiverError, push_offer
from dovetail.protocol.messages import Offer, Probe, Publish, Receiver
from helpers.patience import PATIENCE
from helpers.vllm_servers import TOKEN, Server

EPOCHS = itertools.count(1)


class Alone:
    """The process groups of one rank."""

    rank = 0
    world_size = 1
    device = torch.device("cpu")
    model = {"actor": SimpleNamespace(dp_rank=0, pp_rank=0, tp_rank=0)}  # noqa: RUF012

    def broadcast_json(self, value: Any) -> Any:
        return value

    def gather_json(self, value: Any) -> list[Any]:
        return [value]


def actor_of(config: Any, seed: int) -> Any:
    """A LlamaForCausalLM with random weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(config).float().eval()


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What trainers send: a tied weight once, under the embedding's name."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def publish_command(servers: Sequence[Server], version: int, epoch: int, seconds: float) -> Publish:
    receivers, offset = [], 1
    for s in servers:
        world = s.call("/dovetail/info")[1]["world"]
        receivers.append(Receiver(name=s.name, kind="rollout", models=["actor"], rank_offset=offset, world=world))
        offset += world
    return Publish(id="p", version=version, epoch=epoch, receivers=receivers, deadline_seconds=seconds)


def push(servers: Sequence[Server], command: Publish, offer: Offer, new: bool) -> dict[str, str | None]:
    """Tell the servers of an offer; errors by receiver."""

    async def run() -> dict[str, str | None]:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            pairs = [(r, s.url) for r, s in zip(command.receivers, servers, strict=True)]
            return await push_offer(session, offer, pairs, new)

    return asyncio.run(run())


def probe_of(model: Any, version: int, temperature: float = 1.0) -> Probe:
    """As trainers make it; `model`: of transformers, or a whole stage. `temperature`: the job's."""
    from dovetail.trainer.weights.probe_logprobs import TOKENS, probe_tokens

    tokens = probe_tokens(model.config.vocab_size, TOKENS)
    with torch.no_grad():
        output = model(torch.tensor([tokens]))
    logprobs = (getattr(output, "logits", output)[0, :-1] / temperature).log_softmax(-1)
    said = logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    return Probe(version=version, tokens=tokens, logprobs=said.tolist(), dtype="float32")


async def prove(session: aiohttp.ClientSession, url: str, probe: Probe, dtype: str = "float32") -> str | None:
    """Why a server may not serve what it took, or None: it does from now on. `dtype`: the server's."""
    try:
        await publishing.prove(session, publishing.ProbedServer(url, dtype=dtype), probe, probe.version)
    except ReceiverError as error:
        return str(error)
    return None


class Trainer:
    """A real WeightSender of one rank; small buckets, so that a tiny model makes several. `dtype`: the servers'."""

    def __init__(self, servers: Sequence[Server], dtype: str = "float32"):
        from dovetail.trainer.weight_sender import WeightSender

        self.servers, self.dtype = servers, dtype
        self.offers: queue.Queue[Offer] = queue.Queue()
        self.sender = WeightSender(Alone(), self.offers.put, host="127.0.0.1", bucket_bytes=150_000)  # type: ignore[arg-type]
        self.epoch = next(EPOCHS)
        self.new = True

    def publish(self, model: Any, version: int, seconds: float = PATIENCE) -> dict[str, str | None]:
        """Errors by receiver; raises what the sender raised if the receivers saw nothing wrong."""
        command = publish_command(self.servers, version, self.epoch, seconds)
        new, self.new = self.new, False
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self.sender.publish, command, {"actor": lambda: weights_of(model)})
            try:
                offer = self.offers.get(timeout=PATIENCE)
            except queue.Empty:
                sending.result(timeout=PATIENCE)  # why it made no offer
                raise
            errors = push(self.servers, command, offer, new)
            if any(errors.values()):
                self.epoch, self.new = next(EPOCHS), True
                sending.exception()
                return errors
            assert sending.result()["bytes"] >= sum(p.nbytes for p in model.parameters())
        return asyncio.run(self._prove(probe_of(model, version)))

    async def _prove(self, probe: Probe) -> dict[str, str | None]:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            return {server.name: await prove(session, server.url, probe, self.dtype) for server in self.servers}
