"""torch's rendezvous asks nobody for a token: it must be reachable at the job's address alone."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dovetail.models.transfer import Deadline, call, listen, store_at
from dovetail.trainer.communication.groups import Groups
from helpers.free_ports import free_port
from helpers.trainer_ranks import layouts


def wildcards() -> set[str]:
    """Ports on which this process listens on all interfaces."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A" and fields[9] in inodes and not address.strip("0"):
                found.add(port)
    return found


@pytest.mark.slow
def test_trainers_and_weight_senders_listen_at_their_own_address_alone() -> None:
    before = wildcards()
    groups = Groups.form("127.0.0.1", free_port("127.0.0.1"), 0, 1, layouts(), 60.0)
    store, port = listen("127.0.0.1", Deadline(60))
    try:
        assert wildcards() == before
        other = call("127.0.0.1", port, Deadline(60))
        other.set("key", "value")
        assert store.get("key") == b"value"
    finally:
        groups.close()


def test_a_store_can_be_made_again_at_once_at_the_same_port() -> None:
    """As a generation of trainers follows another."""
    store = store_at("127.0.0.1", 0, None, timedelta(seconds=60))
    port = int(store.port)
    client = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
    client.set("key", "value")
    del client, store
    assert int(store_at("127.0.0.1", port, None, timedelta(seconds=60)).port) == port
