"""Where a response is cut when its sample goes on elsewhere: a stop string ends it exactly where it would have.

The servers' side is the library's own stream, as vLLM uses it: primed with what it is given, asked for new text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dovetail.coordinator.samples.in_flight import GenerationSettings
from dovetail.coordinator.samples.migrations import StopStrings

STOP = "Human:"


def byte_tokenizer() -> Tokenizer:
    """A token a byte."""
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = Decoder()
    return tokenizer


TOKENIZER = byte_tokenizer()


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def decode(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(tokens), skip_special_tokens=False))


def ends_at(prompt: list[int], rest: list[int]) -> int | None:
    """As a vLLM server: how many tokens of `rest` it makes before the stop string; None: all."""
    stream, text = DecodeStream(ids=prompt, skip_special_tokens=False), ""
    for made, token in enumerate(rest, 1):
        text += stream.step(TOKENIZER, token) or ""
        if STOP in text:
            return made
    return None


@given(
    st.text("aä€😀Human: ", max_size=12),
    st.text("aä€😀Human: ", min_size=1, max_size=12),
    st.booleans(),
    st.integers(0, 60),
)
@example("Human: hi ", "€€€", False, 4)
@example("Human: hi ", "a", True, 4)
def test_a_moved_response_ends_where_it_would_have(begin: str, end: str, stops: bool, cut: int) -> None:
    prompt = tokens_of("Human: say something. Assistant:")
    response = tokens_of(begin + (STOP if stops else "") + end)
    undisturbed = ends_at(prompt, response)
    had = min(cut, len(response) - 1, len(response) if undisturbed is None else undisturbed - 1)
    keep = StopStrings([STOP], decode).kept(prompt, response[:had])
    assert had - keep <= len(STOP) - 1 + 3, "no more is made again than the stop string and a character need"
    continued = ends_at(prompt + response[:keep], response[keep:])
    assert (None if continued is None else keep + continued) == undisturbed


def test_a_server_that_begins_within_a_character_would_see_the_prompts_stop_string() -> None:
    prompt, response = tokens_of("Human: hi. Assistant: "), tokens_of("€ is a euro sign")
    assert ends_at(prompt, response) is None
    assert ends_at(prompt + response[:1], response[1:]) == 2
    assert StopStrings(["!"], decode).kept(prompt, response[:1]) == 0
    assert StopStrings(["!"], decode).kept(prompt, response[:3]) == 3


def test_without_stop_strings_all_tokens_are_kept() -> None:
    assert StopStrings([], decode).kept([1], tokens_of("€")[:2]) == 2
    assert StopStrings(["abc"]).kept([1], [5, 6, 7, 8]) == 2
    assert StopStrings(["abc"]).kept([1], [5]) == 0


@pytest.mark.parametrize(("samples", "interval"), [(1, 1), (64, 1), (65, 2), (512, 8), (10_000, 64)])
def test_the_fewer_samples_the_fewer_tokens_a_death_costs(samples: int, interval: int) -> None:
    assert GenerationSettings().interval(samples) == interval
    assert GenerationSettings(stream_interval=3).interval(samples) == 3


@pytest.mark.parametrize(("step", "interval"), [(None, 1), (0.2, 1), (0.03, 3), (0.01, 10), (1e-5, 64)])
def test_tokens_that_come_fast_share_events(step: float | None, interval: int) -> None:
    assert GenerationSettings().interval(8, step) == interval
