"""A coordinator that a tenant wrote to harm whoever asks it; as a program, the operator and the status API ask it.

`python -m helpers.hostile_coordinator WAY...` prints JSON, by way: what both made of it, the bytes of memory that it
took, and the requests that another host got."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import resource
import sys
import zlib
from collections.abc import AsyncIterator
from typing import Any

from dovetail.kube import coordinator_http, names
from dovetail.operator.cluster import coordinator_poller as coordinators
from dovetail.operator.cluster.coordinator_poller import CoordinatorPoller
from dovetail.operator.reconcile.children import Children
from dovetail.protocol.process.process_names import COORDINATOR
from dovetail.statusapi.coordinator_reader import CoordinatorReader
from helpers.patience import PATIENCE

JSON = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
MIB = 1 << 20
SLOW = ("informational", "drip", "silent")  # the others end by themselves


def _whole(body: bytes, headers: str = "") -> bytes:
    return f"{JSON}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


@functools.cache
def _bomb() -> bytes:
    """256 MiB of blanks, made with little memory: the asker is in this process."""
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(b" " * MIB) for _ in range(256)) + packer.flush()


async def _answer(way: str, path: str, elsewhere: str) -> AsyncIterator[bytes]:
    if way == "endless":
        yield f"{JSON}Transfer-Encoding: chunked\r\n\r\n".encode()
        while True:
            yield b"100000\r\n" + b" " * MIB + b"\r\n"
    elif way == "long":
        yield f"{JSON}Content-Length: {1 << 40}\r\n\r\n".encode()
        while True:
            yield b" " * MIB
    elif way in ("gzip", "br"):
        yield _whole(_bomb(), f"Content-Encoding: {way}\r\n")
    elif way == "redirect":
        yield f"HTTP/1.1 307 Go\r\nLocation: {elsewhere}\r\nContent-Length: 0\r\n\r\n".encode()
    elif way == "headers":
        yield b"HTTP/1.1 200 OK\r\n"
        while True:
            yield b"".join(b"X-%d: %s\r\n" % (i, b"a" * 4000) for i in range(256))
    elif way == "informational":
        while True:
            yield b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 4096
    elif way == "drip":
        yield f"{JSON}Transfer-Encoding: chunked\r\n\r\n".encode()
        while True:
            yield b"1\r\n \r\n"
            await asyncio.sleep(0.05)
    elif way == "silent":
        await asyncio.Event().wait()
    elif way == "values":
        yield _whole(b'{"stage": "sft", "step": 1, "x": [' + b"{}," * (300 * 1024) + b"{}]}")
    elif way == "deep":
        yield _whole(b'{"stage": "sft", "x":' + b"[" * 190_000 + b"]" * 190_000 + b"}")
    elif way == "numbers":
        yield _whole(b'{"stage": "sft", "step": 1e999, "total_steps": ' + b"9" * 4000 + b"}")
    elif way == "words":
        yield _whole(b'{"stage": "sft", "step": 1, "total_steps": 2, "metrics": [1], "plan": "none"}')
    elif way == "history" and path.startswith("/v1/history"):
        offset = int(path.partition("=")[2]) + MIB
        row = {"stage": "ppo", "step": 1, "time": 1.0, "metrics": {f"m{i}" * 20: i for i in range(1000)}}
        rows = [row] * (MIB // len(json.dumps(row)))
        yield _whole(json.dumps({"offset": offset, "rows": rows}).encode())
    else:
        yield _whole(b'{"stage": "ppo", "iteration": 1, "total_iterations": 2}')


class Kube:
    """The job's Secret."""

    async def request(self, *_: Any, **__: Any) -> Any:
        owner = {
            "apiVersion": "dovetail.dev/v1beta1",
            "kind": "RLHFJob",
            "name": "demo",
            "uid": "u",
            "controller": True,
        }
        secret = {
            "metadata": {"name": names.token_secret("demo"), "ownerReferences": [owner]},
            "data": {"token": base64.b64encode(b"the-jobs-own").decode()},
        }
        return json.dumps(secret)


async def ask(way: str) -> dict[str, Any]:
    got: list[str] = []
    asked: list[str] = []
    again = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                asked.append(head)
                if len(asked) == 2:
                    again.set()
                async for part in _answer(way, head.split()[1], elsewhere):
                    writer.write(part)
                    await writer.drain()

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(_whole(b'{"stage": "sft", "step": 1, "total_steps": 2}'))

    there = await asyncio.start_server(other, "127.0.0.2", 0)
    elsewhere = f"http://127.0.0.2:{there.sockets[0].getsockname()[1]}/v1/status"
    hostile = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = hostile.sockets[0].getsockname()[1]
    seconds = 1.0 if way in SLOW else 20.0
    coordinator_http.COORDINATOR_PORT, coordinators.TIMEOUT_SECONDS = port, seconds
    labels = {names.JOB_LABEL: "demo", names.ROLE_LABEL: COORDINATOR}
    pod = {"metadata": {"name": "c", "labels": labels}, "status": {"phase": "Running", "podIP": "127.0.0.1"}}
    job = {"metadata": {"name": "demo", "namespace": "lab", "uid": "u"}}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with coordinator_http.session() as session:
        changed: asyncio.Queue[Any] = asyncio.Queue()
        operator = CoordinatorPoller(session, 0.05, changed.put)
        key = ("lab", "demo")
        operator.report(key, Children({("Pod", "c"): pod}), "the-jobs-own")
        task = operator._followed[key].task
        # It asks a second time, or reports something, or has ended.
        ends = {task, asyncio.ensure_future(changed.get())}
        if way != "history":
            ends.add(asyncio.ensure_future(again.wait()))
        await asyncio.wait(ends, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        alive, reported = not task.done(), operator._followed[key].answer
        await operator.close()

        async def url(_: object) -> str:
            return f"http://127.0.0.1:{port}"

        api = CoordinatorReader(Kube(), session, url, 0.0, lambda: 0.0, seconds)  # type: ignore[arg-type]
        progress = await asyncio.wait_for(api.progress(job), PATIENCE)
    return {
        "alive": alive,
        "reported": reported,
        "reachable": progress.live.reachable,
        "message": progress.live.message,
        "rows": len(progress.rows),
        "bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
        "elsewhere": got,
    }


if __name__ == "__main__":
    print(json.dumps({way: asyncio.run(ask(way)) for way in sys.argv[1:]}))
