"""The messages between the coordinator and a server that draws samples, and when a server sends its frames."""

from __future__ import annotations

import asyncio
import json
import struct
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from dovetail.protocol.sample_stream import (
    PART,
    REASONS,
    Answers,
    FrameError,
    Row,
    pack_aborts,
    pack_requests,
    pack_rows,
    unpack_asked,
    unpack_rows,
)
from helpers.patience import PATIENCE


def row(number: int, tokens: list[int], reason: str | None = None, extra: bytes = b"") -> Row:
    return Row(number, array("i", tokens), array("f", [-token / 3 for token in tokens]), reason, extra)


def test_requests_and_aborts_arrive_as_they_were_sent() -> None:
    requests = [({"number": 7, "sampling_params": {"n": 1}}, array("i", [1, 2**31 - 1])), ({"number": 8}, array("i"))]
    sent = pack_requests([(json.dumps(fields).encode(), tokens) for fields, tokens in requests], 0.5)
    assert unpack_asked(sent) == ([(fields, list(tokens)) for fields, tokens in requests], 0.5)
    assert unpack_asked(pack_requests([], 0.25)) == ([], 0.25)
    assert unpack_asked(pack_aborts(["a", "é"])) == ["a", "é"]


def test_rows_arrive_bit_by_bit() -> None:
    odd = Row(3, array("i", [0, -1]), array("f", [float("-inf"), -0.1]), None)
    rows = [row(2**32 - 1, [5, 6], reason, b"why") for reason in REASONS] + [row(0, []), odd]
    found = unpack_rows(pack_rows(rows))
    assert found == rows
    assert found[-1].logprobs.tobytes() == np.array([-np.inf, -0.1], "<f4").tobytes()


def test_a_token_takes_few_bytes() -> None:
    assert len(pack_rows([row(i, list(range(30))) for i in range(256)])) < 9 * 30 * 256


FRAME = pack_rows([row(1, [5, 6], "stop", b"x")])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (b"", "shorter than its header"),
        ("text", "shorter than its header"),
        (b"x" * 40, "begins with b'xxxx'"),
        (FRAME[:4] + struct.pack("<H", 9) + FRAME[6:], "version 9 of the sample stream; this process speaks 1"),
        (FRAME[:-1], "with 1 rows and 2 tokens"),
        (FRAME + b"x", "with 1 rows and 2 tokens"),
        (FRAME[:20], "with 1 rows"),
        (FRAME[:24] + struct.pack("<I", 99) + FRAME[28:], "with 1 rows"),
        (pack_aborts(["a"]), "of kind 2"),
    ],
    ids=["empty", "text", "magic", "version", "short", "long", "no arrays", "reason", "kind"],
)
def test_a_bad_frame_is_one_clear_error(wrong: bytes | str, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        unpack_rows(wrong)


@pytest.mark.parametrize(
    "wrong", [FRAME, pack_requests([(b"{}", [1, 2])], 1.0)[:-4], pack_aborts([])[:-1]], ids=["rows", "short", "json"]
)
def test_a_bad_message_of_the_coordinator_is_one_clear_error(wrong: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_asked(wrong)


def answered(scenario: Callable[[Answers, Callable[[], object]], object], seconds: float) -> None:
    """Run with answers whose frames are sent into a queue, of which the second argument gives the next one."""

    async def main() -> None:
        frames: asyncio.Queue[list[Row]] = asyncio.Queue()

        async def send(frame: bytes) -> None:
            frames.put_nowait(unpack_rows(frame))

        answers = Answers(send, seconds)
        sending = asyncio.create_task(answers.run())
        async with asyncio.timeout(PATIENCE):
            await scenario(answers, frames.get)  # type: ignore[misc]
        sending.cancel()

    asyncio.run(main())


def test_first_tokens_and_ends_are_sent_at_once_and_other_tokens_with_the_next_frame() -> None:
    async def scenario(answers: Answers, frame: Callable[[], asyncio.Future[list[Row]]]) -> None:
        answers.add(1, [5], [-1.0])
        assert [(r.number, list(r.tokens)) for r in await frame()] == [(1, [5])]
        answers.add(1, [6], [-1.0])
        answers.add(2, [7], [-1.0])
        assert [(r.number, list(r.tokens)) for r in await frame()] == [(2, [7])], "the next frame is due in an hour"
        answers.add(1, [8], [-0.5])
        answers.add(2, [], [], "stop", b"experts")
        assert [(r.number, r.reason, r.extra) for r in await frame()] == [(2, "stop", b"experts")]
        answers.add(1, [9], [-2.0], "length")
        (last,) = await frame()
        assert (list(last.tokens), list(last.logprobs), last.reason) == ([6, 8, 9], [-1.0, -0.5, -2.0], "length")

    answered(scenario, 3600.0)


def test_every_token_is_sent_when_frames_are_due() -> None:
    async def scenario(answers: Answers, frame: Callable[[], asyncio.Future[list[Row]]]) -> None:
        for token in range(5):
            answers.add(1, [token], [-1.0])
            assert [list(r.tokens) for r in await frame()] == [[token]]

    answered(scenario, 0.0)


def test_tokens_that_come_while_nobody_reads_are_sent_together() -> None:
    async def main() -> None:
        frames, room, full = list[bytes](), asyncio.Event(), asyncio.Event()

        async def send(frame: bytes) -> None:
            frames.append(frame)
            full.set()
            await room.wait()

        answers = Answers(send)
        sending = asyncio.create_task(answers.run())
        answers.add(1, [0], [-1.0])
        await full.wait()
        for token in range(1, 100):
            answers.add(1, [token], [-1.0])
        answers.add(1, [100], [-1.0], "stop")
        full.clear()
        room.set()
        await full.wait()
        sending.cancel()
        assert [list(r.tokens) for f in frames for r in unpack_rows(f)] == [[0], list(range(1, 101))]

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_long_answers_are_sent_in_parts() -> None:
    async def scenario(answers: Answers, frame: Callable[[], asyncio.Future[list[Row]]]) -> None:
        for number in range(5):
            answers.add(number, [1], [-1.0], "stop", bytes(PART // 2))
        assert [[r.number for r in await frame()] for _ in range(3)] == [[0, 1], [2, 3], [4]]

    answered(scenario, 0.0)
