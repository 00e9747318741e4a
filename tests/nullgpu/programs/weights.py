"""Weights from trainer ranks to receivers, each a process. On the null GPU data does not travel. So its tests do not
ask what arrives, but who gets all of it in time. tests/gpu asks for the bytes too."""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from programs.trainer import engine_of
from worker import PATIENCE, Place

from dovetail.coordinator.workers.offers import receive_for
from dovetail.manifest.types import Parallelism
from dovetail.models.links.deadline import TransferError
from dovetail.models.links.nccl import NcclLink
from dovetail.models.transfer import Channel
from dovetail.protocol.messages import Offer, Publish, Receive, Receiver, SendOn
from dovetail.rollout.peer_sender import PeerSender
from dovetail.rollout.received_copy import ReceivedCopy
from dovetail.rollout.weight_receiver import WeightReceiver
from dovetail.trainer.weight_sender import WeightSender

TENSORS = {f"layer.{n}": (64, 64) for n in range(8)}


def content(name: str) -> torch.Tensor:
    """A tensor's values, the same in every process. On the null GPU they are zeros."""
    generator = torch.Generator("cuda").manual_seed(zlib.crc32(name.encode()))
    return torch.randn(TENSORS[name], device="cuda", generator=generator)


def wait_for(path: Path) -> str:
    """The text of a file that another process makes."""
    end = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.01)
    return path.read_text()


def leave(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


class Alone:
    """The process groups of one trainer rank."""

    rank, world_size, device = 0, 1, torch.device("cuda", 0)
    model = {"actor": SimpleNamespace(dp_rank=0, pp_rank=0, tp_rank=0)}  # noqa: RUF012

    def broadcast_json(self, value: Any) -> Any:
        return value

    def gather_json(self, value: Any) -> list[Any]:
        return [value]


def publish(
    place: Place,
    gpus: list[int],
    trainers: int = 1,
    versions: dict[str, int] | None = None,
    fault: str = "",
    seconds: float = PATIENCE,
    exact: bool = False,
) -> Any:
    """The first `trainers` ranks send; the others receive, each on its one of `gpus`.

    The last receiver has a `fault` in the first round, which has `seconds`; then there is a second round without it.
    Without a fault both rounds are of all, in one epoch. `versions`: other versions of NCCL, by rank. `exact`: only
    tensors of one sender count that have its bytes."""
    names = [f"rollout-{n}" for n in range(len(gpus))]
    bad = names[-1] if fault else None
    rounds = [names, [name for name in names if name != bad]]
    made = [
        [Receiver(name=name, kind="rollout", models=["actor"], rank_offset=n) for n, name in enumerate(here, 1)]
        for here in rounds
    ]
    if versions and str(place.rank) in versions:
        os.environ["NULLGPU_NCCL_VERSION"] = str(versions[str(place.rank)])
    if place.rank < trainers:
        torch.cuda.set_device(place.rank)
        return send(replace(place, world=trainers), made, 2 if fault else 1, seconds)
    gpu, name = gpus[place.rank - trainers], names[place.rank - trainers]
    torch.cuda.set_device(gpu)
    return take(place, made, name, torch.device("cuda", gpu), fault if name == bad else "", exact)


def send(place: Place, rounds: list[list[Receiver]], epochs: int, seconds: float) -> Any:
    groups: Any = Alone()
    weights: dict[str, Any] = {"actor": lambda: [(n, content(n)) for n in TENSORS]}
    engine = None
    if place.world > 1:
        layout = Parallelism(pp=place.world)
        engine = engine_of(place, {"actor": layout, "critic": layout})
        groups = engine.groups

    def post(offer: Offer) -> None:
        leave(place.folder / f"offer-{offer.version}", offer.model_dump_json())

    # The coordinator sees at once that a receiver has died.
    cancelled = (place.folder / "died").exists
    sender = WeightSender(groups, post, host="127.0.0.1", bucket_bytes=20_000, cancelled=cancelled)
    found: list[Any] = []
    for version, receivers in enumerate(rounds, 1):
        if engine is not None:
            weights = {"actor": engine.sendable("actor", sender.max_senders)}
        epoch = min(version, epochs)
        deadline = seconds if version == 1 else PATIENCE
        command = Publish(id="p", version=version, epoch=epoch, receivers=receivers, deadline_seconds=deadline)
        started = time.monotonic()
        try:
            sender.publish(command, weights)
            lines = sender._lines.values()
            found.append([way for line in lines if line.channel is not None for way in line.channel.ways])
        except TransferError as error:
            found.append(str(error))
            (place.folder / "died").unlink(missing_ok=True)
        found.append(time.monotonic() - started)
    # The coordinator ends no sender before all receivers of the last version have answered.
    for receiver in rounds[-1]:
        wait_for(place.folder / f"answered-{receiver.name}-{len(rounds)}")
    if groups.rank == 0:
        leave(place.folder / "over", "")
    sender.close()
    return found


def take(
    place: Place, rounds: list[list[Receiver]], name: str, device: torch.device, fault: str, exact: bool = False
) -> Any:
    """What came of each round: the number of tensors, or the error."""
    receiver = WeightReceiver(device)

    def end(*_: Any, **__: Any) -> None:
        if fault.startswith("freezes"):
            wait_for(place.folder / "over")
        else:
            leave(place.folder / "died", "")
        os._exit(3)

    if fault.endswith("in set-up"):
        NcclLink.__init__ = end  # type: ignore[method-assign]
    if fault.endswith("while it connects"):
        Channel._connect = end  # type: ignore[method-assign]
    found: list[Any] = []
    for version, receivers in enumerate(rounds, 1):
        offer = Offer.model_validate_json(wait_for(place.folder / f"offer-{version}"))
        me = next((r for r in receivers if r.name == name), None)
        if me is None:
            continue
        count = 0
        try:
            for tensor_name, tensor in receiver.receive(receive_for(offer, me, receivers)):
                count += exact is False or torch.equal(tensor.cuda(), content(tensor_name))
                if fault.endswith("midway"):
                    end()
            found.append(count)
        except TransferError as error:
            found.append(str(error))
        leave(place.folder / f"answered-{name}-{version}", "")
    wait_for(place.folder / "over")
    receiver.close()
    return found


def relay(place: Place) -> Any:
    """Rank 0 sends to rank 1, which sends its copy to rank 2, each on a GPU of its own: how many tensors came, and
    which devices the copy is on."""
    torch.cuda.set_device(place.rank)
    device = torch.device("cuda", place.rank)
    first = Receiver(name="rollout-0", kind="rollout", models=["actor"], rank_offset=1)
    if place.rank == 0:
        return send(replace(place, world=1), [[first]], 1, PATIENCE)[0]
    copy = ReceivedCopy()
    receiver = WeightReceiver(device, copy=copy if place.rank == 1 else None)
    if place.rank == 1:
        offer = Offer.model_validate_json(wait_for(place.folder / "offer-1"))
        count = sum(1 for _ in receiver.receive(receive_for(offer, first, [first])))
        leave(place.folder / f"answered-{first.name}-1", "")
        request = SendOn(version=1, epoch=100, world_size=2, deadline_seconds=PATIENCE)
        leave(place.folder / "offer-on", PeerSender(copy, "127.0.0.1").send(request).model_dump_json())
        wait_for(place.folder / "taken")
        with copy.using(1) as copied:
            assert copied is not None
            found: Any = [count, sorted({str(message.device) for message in copied.messages})]
    else:
        offer = Offer.model_validate_json(wait_for(place.folder / "offer-on"))
        found = sum(1 for _ in receiver.receive(Receive(offer=offer, rank_offset=1, world_size=2)))
        leave(place.folder / "taken", "")
    receiver.close()
    return found
