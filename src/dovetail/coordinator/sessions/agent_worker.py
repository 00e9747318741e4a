"""The process around an agent: `python -P -m dovetail.coordinator.sessions.agent_worker PARENT`.

The first request (`user_requests`) is {"limited", "user"}, and is answered with {}. The other one is {"command",
"folder", "record", "key", "socket"}. The command gets the record on its input, and reaches the routes at
OPENAI_BASE_URL: those behind the Unix socket, also where there is no network, or without a socket those of the
coordinator. When it has ended, the answer is {"exit": code, "said": last line of stderr}, or {"refused": sentence} if
it cannot be started."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from dovetail.coordinator.user_code.sandbox import limit_this_process
from dovetail.coordinator.user_code.user_requests import Answer, Reply, answer_requests, one_line
from dovetail.protocol.process import env
from dovetail.protocol.process.endings import die_with_parent
from dovetail.protocol.process.inheritance import on_this_machine

# What the agent started may hold its output open.
_OUTPUT_SECONDS = 2.0


def _load(order: Mapping[str, Any]) -> tuple[Answer, Reply]:
    if order["limited"]:
        limit_this_process(order["user"])
    return (lambda request, loop: loop.run_until_complete(_run(request))), {}


async def _run(request: Mapping[str, Any]) -> Reply:
    command, url = request["command"], os.environ.get(env.COORDINATOR, "")
    if request["socket"] is not None:
        server = await asyncio.start_server(partial(_relay, request["socket"]), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    own = {"PATH": path, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": request["key"]}
    # A pipe of asyncio's own would have the exit wait for all that the agent has started.
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=request["folder"],
            env={**on_this_machine(os.environ), **own},
            stdin=asyncio.subprocess.PIPE,
            stderr=writing,
            preexec_fn=die_with_parent,
        )
    except (OSError, ValueError) as error:
        return {"refused": f"{command[0]} cannot be started: {one_line(str(error))}"}
    finally:
        os.close(writing)
    said = [b""]
    listening = asyncio.create_task(_listen(reading, said))
    assert process.stdin is not None
    process.stdin.write(json.dumps(request["record"]).encode() + b"\n")
    process.stdin.close()
    code = await process.wait()
    await asyncio.wait({listening}, timeout=_OUTPUT_SECONDS)
    lines = b"".join(said).decode(errors="replace").split("\n")
    return {"exit": code, "said": one_line(next((line for line in reversed(lines) if line.strip()), ""))}


async def _listen(reading: int, said: list[bytes]) -> None:
    """Copy what the agent says, and keep the end of it."""
    stderr, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(reading, "rb"))
    while chunk := await stderr.read(1 << 16):
        sys.stderr.buffer.write(chunk)
        sys.stderr.flush()
        said[:] = [b"".join([*said, chunk])[-(1 << 12) :]]


async def _relay(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        far_reader, far_writer = await asyncio.open_unix_connection(path)
    except OSError:
        writer.close()
        return
    await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    sys.exit(answer_requests(_load))
