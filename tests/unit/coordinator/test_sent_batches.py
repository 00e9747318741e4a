"""Batches and parts of them over HTTP, from a file and from memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from dovetail.coordinator.serving.coordinator_routes import PIECE_BYTES, make_app
from dovetail.protocol.http import serving
from dovetail.protocol.messages import BatchPart
from dovetail.protocol.wire import Arrays, pack, unpack

TOKEN = "the-jobs-own"


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_rank_gets_whole_batches_and_parts_as_they_were_packed(tmp_path: Path, on_disk: bool) -> None:
    lengths = np.array([3, PIECE_BYTES // 4 + 9, 5, 2], np.int32)  # one row is sent by itself
    tokens = np.zeros((4, lengths.max()), np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = np.arange(length) + row
    arrays: Arrays = {"tokens": tokens, "loss_mask": (tokens > 1).astype(np.uint8), "lengths": lengths}
    path = tmp_path / "batch"
    path.write_bytes(pack(arrays))

    async def batch(key: str) -> bytes | Path:
        if key != "ppo/1":
            raise KeyError("there is none")
        return path if on_disk else path.read_bytes()

    async def ask() -> dict[str, tuple[int, bytes]]:
        host: Any = SimpleNamespace(batch=batch)
        runner = serving.Runner(make_app(host, TOKEN, CollectorRegistry()))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url, found = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/batches/", {}

        async def answer(name: str, key: str, part: BatchPart | None) -> None:
            body = None if part is None else part.model_dump(mode="json")
            async with session.request("GET" if part is None else "POST", url + key, json=body) as reply:
                found[name] = reply.status, await reply.read()

        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            await asyncio.gather(*(answer(f"whole {i}", "ppo/1", None) for i in range(8)))
            await answer("index", "ppo/1", BatchPart())
            await answer("part", "ppo/1", BatchPart(rows=[1, 3], some=["tokens"], whole=["loss_mask"]))
            await answer("no row", "ppo/1", BatchPart(rows=[4], some=["tokens"]))
            await answer("no batch", "ppo/2", BatchPart())
            path.unlink()
            await answer("gone", "ppo/1", None) if on_disk else None
        await runner.cleanup()
        return found

    found = asyncio.run(ask())
    for i in range(8):
        whole = unpack(found[f"whole {i}"][1])
        assert all(np.array_equal(whole[name], arrays[name]) for name in arrays)
    assert unpack(found["index"][1]).keys() == {"lengths"}
    part = unpack(found["part"][1])
    assert np.array_equal(part["tokens"][[1, 3]], tokens[[1, 3]])
    assert not part["tokens"][[0, 2]].any()
    assert np.array_equal(part["loss_mask"], arrays["loss_mask"])
    assert found["no row"] == (409, b"tokens has no row 4")
    assert found["no batch"][0] == 404
    assert found.get("gone", (404, b""))[0] == 404
