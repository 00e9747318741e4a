"""Decides which KV connector a server runs, with which settings, and what the server tells the coordinator about it. It
imports nothing of vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from dataclasses import dataclass, field
from typing import Any, Literal

from dovetail.protocol.messages import HOLD_SECONDS, KVAbility

Transport = Literal["tcp", "nixl"]

CONNECTORS: dict[Transport, str] = {"tcp": "DovetailConnector", "nixl": "NixlConnector"}
TCP_MODULE = "dovetail.rollout.kv.connector"

PULL_SECONDS = 20.0
# A request that is just being aborted may take so long to appear at the other end.
WAIT_SECONDS = 5.0
# The most host memory for kept blocks of all ranks, in bytes and as a share of the machine's memory.
MAX_HELD_BYTES = 4 << 30
MAX_HELD_SHARE = 1 / 16


@dataclass
class KVSetup:
    """`arguments` and `environment` are for vLLM. `ability` is what the server announces. `reserved` keeps ports from
    other programs until the workers bind them, and must stay open until then."""

    ability: KVAbility
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    reserved: list[socket.socket] = field(default_factory=list)


def choose_transport(on_cpu: bool) -> Transport:
    """NIXL (GPU memory to GPU memory) if it is installed and there are GPUs. Otherwise TCP from host memory."""
    return "tcp" if on_cpu or importlib.util.find_spec("nixl") is None else "nixl"


def reserve_ports(host: str, count: int) -> list[socket.socket]:
    """Reserve ports with sockets that are bound and do not listen. While they are open, only sockets of this user with
    SO_REUSEPORT can bind the ports."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    sockets = []
    for _ in range(count):
        reserved = socket.socket(family, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, 0))
        sockets.append(reserved)
    return sockets


def held_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(MAX_HELD_BYTES, int(memory * MAX_HELD_SHARE))


def prepare(host: str, on_cpu: bool, ranks: int, layout: str, token_bytes: int) -> KVSetup:
    """Choose the connector and reserve its ports. `host`: the address at which other servers reach this one. `ranks`:
    the number of tensor-parallel ranks. `layout`: see KVAbility. Raises OSError if `host` is no address of this
    machine."""
    transport = choose_transport(on_cpu)
    reserved = reserve_ports(host, ranks if transport == "tcp" else 1)
    ports = [s.getsockname()[1] for s in reserved]
    # If a load fails, its tokens are recomputed. It is never an error of the request.
    config: dict[str, Any] = {
        "kv_connector": CONNECTORS[transport],
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    environment = {}
    if transport == "tcp":
        config["kv_connector_module_path"] = TCP_MODULE
        config["kv_connector_extra_config"] = {
            "host": host,
            "ports": ports,
            "layout": layout,
            "held_bytes": held_bytes() // ranks,
            "hold_seconds": HOLD_SECONDS,
            "pull_seconds": PULL_SECONDS,
            "wait_seconds": WAIT_SECONDS,
        }
    else:
        # NIXL binds its port itself, without SO_REUSEPORT.
        reserved.pop().close()
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.pop())}
    ability = KVAbility(transport=transport, host=host, ports=ports, layout=layout, token_bytes=token_bytes)
    return KVSetup(ability, ["--kv-transfer-config", json.dumps(config)], environment, reserved)
