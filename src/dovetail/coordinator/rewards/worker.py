"""A process that calls reward functions: `python -P -m dovetail.coordinator.rewards.worker PARENT`.

Input and output are JSON lines. The first input line is {"folder", "functions": [{"name", "field"}]}. The others are
{"function": number, "prompts", "responses", "fields"}. The first output line is {"ready": [...]} (`values.describe`) or
{"refused": sentence}. The others are {"rewards", "steps"}, {"wrong": what} or {"raised": ...} (`values.raised`). Text
that functions print goes to stderr. On SIGUSR1, the main thread's frames go there too. The process ends when its input
or its parent ends."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import io
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TextIO

from dovetail.coordinator.rewards.values import WrongRewards, checked, describe, raised
from dovetail.manifest import callables
from dovetail.protocol.process.endings import die_with_parent

# The frames of these files are not the user's.
_OWN = {__file__, callables.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"}
_OWN.add(str(sys.modules["importlib"].__file__))


def _pipes() -> tuple[TextIO, TextIO]:
    """The pipes of requests and replies. They use descriptors to which functions and their children cannot write by
    accident."""
    requests, replies = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _die_with(parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        os._exit(0)


def _load(order: dict[str, Any]) -> tuple[list[Callable[..., Any]], dict[str, Any]]:
    """Import the functions. Returns them and the first output line."""
    functions, ready = [], []
    for wanted in order["functions"]:
        name, field = wanted["name"], wanted["field"]
        try:
            function = callables.load_callable(name, field, order["folder"])
            ready.append(describe(function))
        except ValueError as error:
            text = str(error)
            return [], {"refused": text if text.startswith(field) else f"{field}: {name!r}: {text}"}
        except BaseException as error:
            found = raised(error, _OWN)
            at = f"; last frames: {', '.join(found['frames'])}" if found["frames"] else ""
            return [], {"refused": f"{field}: importing {name!r} raised {found['what']}{at}"}
        functions.append(function)
    return functions, {"ready": ready}


def _call(function: Callable[..., Any], request: dict[str, Any], loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    try:
        # A function may change its arguments, and the check needs the responses.
        result = function(request["prompts"], list(request["responses"]), **request["fields"])
        if inspect.isawaitable(result):
            result = loop.run_until_complete(_awaited(result))
        found = checked(result, request["responses"])
        return {"rewards": found.rewards, "steps": found.steps}
    except WrongRewards as error:
        return {"wrong": str(error)}
    # SystemExit is caught too. A function that calls sys.exit() must not look like a worker that has ended normally.
    except BaseException as error:
        return {"raised": raised(error, _OWN)}


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _lines(file: TextIO) -> Iterator[dict[str, Any]]:
    for line in iter(file.readline, ""):
        yield json.loads(line)


def main(argv: list[str] | None = None) -> int:
    """Answer requests until the input ends. Returns the exit code."""
    (parent,) = sys.argv[1:] if argv is None else argv
    _die_with(int(parent))
    requests, replies = _pipes()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a function prints must not fail its call, whatever the locale is.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    # The coordinator handles Ctrl-C, and ends this process itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    functions: list[Callable[..., Any]] = []
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for number, request in enumerate(_lines(requests)):
        if number == 0:
            functions, reply = _load(request)
        else:
            reply = _call(functions[request["function"]], request, loop)
        sys.stdout.flush()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
