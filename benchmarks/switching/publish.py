"""Part 2: the trainer's own engine and weight publisher, from trainer ranks (pp x dp) to receivers."""

from __future__ import annotations

import os
import queue
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dovetail.manifest.types import Parallelism, RLHFJobSpec, ScratchModel, Stage
from dovetail.protocol.messages import Load, ModelRef, Offer, Publish, Receive, Receiver
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.engine.engine_model import like
from dovetail.trainer.engine.optim import local
from dovetail.trainer.weight_sender import WeightSender
from switching.shapes import config

WAYS = ("gathered, one sender a stage", "routed, all send", "step, then routed", "routed as it is stepped")


def train(rank: int, world: int, port: int, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One trainer rank: seconds by way, from the first rank's begin to the last byte."""
    torch.set_num_threads(1)
    layout = Parallelism(pp=settings["source"]["pp"], dp=settings["source"]["dp"])
    groups = Groups.form("127.0.0.1", port, rank, world, {"actor": layout}, 300.0)
    spec = RLHFJobSpec.model_validate(
        {"groups": [{"name": "t", "roles": ["trainer", "rollout"]}], "plan": {"sharding": "Always"}}
    )
    engine = Engine(spec, groups)
    scratch = ScratchModel(architecture="llama", config=config(settings["layers"], settings["hidden"]))
    engine.load(Load(id="l", stage=Stage.PPO, models={"actor": ModelRef(head="lm", scratch=scratch)}, total_steps=999))
    offers: queue.Queue[Offer] = queue.Queue()
    # Each keeps its communicators from round to round.
    senders = {way == WAYS[0]: WeightSender(groups, offers.put, host="127.0.0.1") for way in WAYS}  # type: ignore[arg-type]
    version = 0
    stop = threading.Event()

    def tell() -> None:
        """Rank 0 leaves each offer where the receivers look."""
        while not stop.is_set():
            try:
                offer = offers.get(timeout=0.05)
            except queue.Empty:
                continue
            hidden = folder / f".{offer.version}"
            hidden.write_text(offer.model_dump_json())
            os.replace(hidden, folder / f"offer-{offer.version}.json")

    teller = threading.Thread(target=tell)
    teller.start()
    generator = torch.Generator().manual_seed(rank)
    gradients = {
        name: like(p, torch.randn(local(p).shape, generator=generator) * 1e-3)
        for name, p in engine.models["actor"].trainable().items()
    }
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    sent = 0.0
    steps: list[float] = []
    # The first round makes communicators and buffers, and is not counted.
    for number in range(settings["repeats"] + 1):
        for way in WAYS:
            version += 1
            held = engine.models["actor"]
            for name, parameter in held.trainable().items():
                parameter.grad = gradients[name]
            command = Publish(
                id=f"p{version}",
                version=version,
                epoch=1,
                receivers=[
                    Receiver(name=f"r{i}", kind="rollout", models=["actor"], rank_offset=1 + i)
                    for i in range(settings["receivers"])
                ],
                deadline_seconds=120,
            )
            if way in WAYS[:2]:
                engine.models["actor"].optimizer.step(1.0)
            groups.barrier()
            begin = time.monotonic()
            if way == WAYS[2]:
                held.optimizer.step(1.0)
                groups.barrier()
                steps.append(time.monotonic() - begin)
            if way == WAYS[3]:
                engine._begun["actor"] = held.optimizer.begin(1.0)
            sender = senders[way == WAYS[0]]
            weights: Any = engine.sendable("actor", 0 if way == WAYS[0] else sender.max_senders)
            sent = sender.publish(command, {"actor": weights})["bytes"]
            engine.settle()
            groups.barrier()
            if number:
                found[way].append(time.monotonic() - begin)
    stop.set()
    teller.join()
    for sender in senders.values():
        sender.close()
    groups.close()
    return {
        "bytes": sent,
        "step": statistics.median(steps[1:]),
        "ways": {way: {"median": statistics.median(s), "best": min(s)} for way, s in found.items()},
    }


def receive(index: int, settings: dict[str, Any], folder: Path, wait: Callable[[Path], None]) -> None:
    """One receiver through all rounds: verifies and assembles, and lets go."""
    from dovetail.rollout.weight_receiver import WeightReceiver

    torch.set_num_threads(1)
    receivers = {way == WAYS[0]: WeightReceiver() for way in WAYS}
    for version in range(1, len(WAYS) * (settings["repeats"] + 1) + 1):
        path = folder / f"offer-{version}.json"
        wait(path)
        offer = Offer.model_validate_json(path.read_text())
        receiver = receivers[(version - 1) % len(WAYS) == 0]
        for _ in receiver.receive(Receive(offer=offer, rank_offset=1 + index, world_size=1 + settings["receivers"])):
            pass
    for receiver in receivers.values():
        receiver.close()
