"""A process that answers requests with a user's code: `python -P -m MODULE PARENT`. It imports only the standard
library and what loads functions.

Input and output are JSON lines, one request and one answer at a time. Text that the code prints goes to stderr. On
SIGUSR1, the main thread's frames go there too. The process ends when its input or its parent ends."""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from dovetail.manifest import callables
from dovetail.protocol.process.endings import die_with_parent

FRAMES = 3
MESSAGE_CHARACTERS = 500

Reply = dict[str, Any]
# Answers a request. An awaitable of the user's code runs in the given loop.
Answer = Callable[[Mapping[str, Any], asyncio.AbstractEventLoop], Reply]

# The frames of these files are not the user's.
OWN = {__file__, callables.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"}
OWN.add(str(sys.modules["importlib"].__file__))


def answer_requests(load: Callable[[Mapping[str, Any]], tuple[Answer, Reply]]) -> int:
    """Answer requests until the input ends. Returns the exit code. `load` gets the first one, and returns what answers
    the others, and its own answer."""
    _die_with(int(sys.argv[1]))
    requests, replies = _pipes()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What the code prints must not fail it, whatever the locale is.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    # The coordinator handles Ctrl-C, and ends this process itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    answer: Answer | None = None
    for line in iter(requests.readline, ""):
        request = json.loads(line)
        if answer is None:
            answer, reply = load(request)
        else:
            reply = answer(request, loop)
        sys.stdout.flush()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    return 0


def load_user_code(name: str, field: str, folder: str, use: Callable[[Any], Any]) -> Any:
    """What `use` makes of the callable that the manifest's `field` names. Raises ValueError with one sentence, whatever
    the user's module does."""
    try:
        return use(callables.load_callable(name, field, folder))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(field) else f"{field}: {name!r}: {text}") from error
    except BaseException as error:
        found = raised(error, OWN)
        at = f"; last frames: {', '.join(found['frames'])}" if found["frames"] else ""
        raise ValueError(f"{field}: importing {name!r} raised {found['what']}{at}") from error


def _pipes() -> tuple[TextIO, TextIO]:
    """The pipes of requests and replies. They use descriptors to which the code and its children cannot write by
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


def one_line(text: str) -> str:
    """The text without line breaks. A long text is cut."""
    flat = " ".join(text.split())
    return flat if len(flat) <= MESSAGE_CHARACTERS else f"{flat[: MESSAGE_CHARACTERS - 3]}..."


def raised(error: BaseException, own: Iterable[str]) -> dict[str, Any]:
    """An exception as JSON. It says `what` it was, its last `frames`, and whether it came from `outside` (a connection
    or a file). The frames before the user's own code, in the files of `own` and in asyncio, are left out."""
    own = set(own)
    found = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(found) if f.filename not in own and not _asyncio(f.filename)), len(found))
    frames = [f"{f.filename}:{f.lineno} in {f.name}" for f in found[first:]]
    if isinstance(error, SyntaxError) and error.filename:
        frames = [f"{error.filename}:{error.lineno}"]
    text = one_line(str(error))
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return {"what": what, "frames": frames[-FRAMES:], "outside": isinstance(error, OSError)}


def _asyncio(file: str) -> bool:
    return os.path.basename(os.path.dirname(file)) == "asyncio"


def digest(file: str) -> str | None:
    """The SHA-256 of a file. None if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
