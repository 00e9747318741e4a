"""torch's rendezvous asks nobody for a token: it must be reachable at the job's address alone, and on one machine for
the job's user alone."""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dovetail.models.links.deadline import Deadline, TransferError
from dovetail.models.links.gloo import GlooLink
from dovetail.models.links.rendezvous import Rendezvous, SignedStore
from dovetail.models.transfer import call, listen, store_at
from dovetail.trainer.communication.groups import Groups, PeerLost
from dovetail.trainer.rank.sending import Exchange
from helpers.free_ports import free_port
from helpers.patience import PATIENCE
from helpers.trainer_ranks import layouts


def listening() -> dict[int, bool]:
    """The ports on which this process listens, and whether on all interfaces."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A" and fields[9] in inodes:
                found[int(port, 16)] = not address.strip("0")
    return found


def wildcards() -> set[int]:
    return {port for port, everywhere in listening().items() if everywhere}


def answers_as_a_store(port: int, seconds: float) -> bool:
    """Whether torch's store is served at the port. It answers a ping from everybody with the ping's number."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as outsider:
        outsider.sendall(struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 4711))
        outsider.settimeout(seconds)
        try:
            return outsider.recv(4) == struct.pack("=I", 4711)
        except OSError:
            return False


@pytest.mark.slow
def test_other_users_of_the_machine_reach_no_rendezvous_of_its_ranks(tmp_path: Path) -> None:
    """They can connect to every port, but not open the file."""
    before = listening().keys()
    groups = Groups.form("127.0.0.1", 0, 0, 1, layouts(), 60.0, meeting=str(tmp_path / "store"), token="t")
    store = store_at("127.0.0.1", 0, None, timedelta(seconds=60), wait_for_workers=False)
    try:
        found = listening().keys() - before
        assert answers_as_a_store(int(store.port), 120.0)
        others = sorted(found - {int(store.port)})
        with ThreadPoolExecutor(max(1, len(others))) as pool:  # each waits for an answer that does not come
            assert not any(pool.map(answers_as_a_store, others, [2.0] * len(others)))
    finally:
        groups.close()


def _rank(rank: int, meeting: str, token: str, answers: Any) -> None:
    try:
        groups = Groups.form("127.0.0.1", 0, rank, 2, layouts(1, 2), 60.0, meeting=meeting, token=token)
        exchange = Exchange.form(groups, "127.0.0.1", timedelta(seconds=60), lambda: False)
        everyone = exchange.gather_json(rank)
        answers.put(exchange.broadcast_json(everyone))
        groups.close()
    except PeerLost as error:
        answers.put(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("token", ["the job's", "another"])
def test_a_rank_takes_nobody_for_its_peer_who_lacks_the_token(tmp_path: Path, token: str) -> None:
    """Gloo takes whoever connects first with a small number."""
    context: Any = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "store"), given, answers), daemon=True)
        for rank, given in enumerate(["the job's", token])
    ]
    for process in ranks:
        process.start()
    told = [answers.get(timeout=PATIENCE) for _ in ranks]
    for process in ranks:
        process.join(PATIENCE)
    if token == "the job's":
        assert told == [[0, 1]] * 2, "the threads that send kept weights meet there too"
    else:
        assert any("is no rank of this job" in str(one) for one in told)
        assert [0, 1] not in told


@pytest.mark.slow
def test_trainers_and_weight_senders_listen_at_their_own_address_alone() -> None:
    before = wildcards()
    groups = Groups.form("127.0.0.1", free_port("127.0.0.1"), 0, 1, layouts(), 60.0)
    store, port = listen("127.0.0.1", Deadline(60))
    try:
        assert wildcards() == before
        other = call("127.0.0.1", port, store.secret, Deadline(60))
        other.set("key", "value")
        assert store.get("key") == b"value"
    finally:
        groups.close()


def test_a_transfer_reads_nothing_that_was_written_without_its_secret() -> None:
    """Whoever reaches the port can list, read and write the keys of torch's store."""
    store, port = listen("127.0.0.1", Deadline(60))
    store.set("key", "value")
    outsider = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60), wait_for_workers=False)
    signed = bytes(outsider.get("key"))
    outsider.set("another key", signed)
    outsider.set("key", "other")
    call("127.0.0.1", port, "a guess", Deadline(60)).set("third", "value")
    receiver = Rendezvous(call("127.0.0.1", port, store.secret, Deadline(60)), 1, 2)
    for key in ("key", "another key", "third"):
        with pytest.raises(TransferError, match=f"{key} was not written by a rank of this transfer"):
            receiver.get(key)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_a_link_takes_nobody_for_a_rank_who_lacks_the_secret(known: bool) -> None:
    """Gloo takes whoever connects first. Here the addresses come by a store that anybody may write to."""
    plain = store_at("127.0.0.1", 0, None, timedelta(seconds=60), wait_for_workers=False)

    class Open(SignedStore):
        def set(self, key: str, value: str | bytes) -> None:
            self._store.set(key, value)  # type: ignore[arg-type]

        def get(self, key: str) -> bytes:
            return bytes(self._store.get(key))

    def link(rank: int, secret: str) -> GlooLink | TransferError:
        mine = dist.TCPStore("127.0.0.1", plain.port, None, False, timeout=timedelta(seconds=60))
        try:
            return GlooLink(Open(mine, secret), rank, 2, "127.0.0.1", Deadline(60))
        except TransferError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(link, [0, 1], ["secret", "secret" if known else "a guess"]))
    for one in links:
        if isinstance(one, GlooLink):
            one.close()
    if known:
        assert not any(isinstance(one, TransferError) for one in links)
    else:
        assert any("does not belong to the transfer" in str(one) for one in links)
        assert all(isinstance(one, TransferError) for one in links), "neither sends nor takes a byte"


def test_a_store_can_be_made_again_at_once_at_the_same_port() -> None:
    """As a generation of trainers follows another."""
    store = store_at("127.0.0.1", 0, None, timedelta(seconds=60))
    port = int(store.port)
    client = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
    client.set("key", "value")
    del client, store
    assert int(store_at("127.0.0.1", port, None, timedelta(seconds=60)).port) == port
