"""The text of responses. Decoding a long response takes milliseconds, and an iteration may have thousands of them. So
the event loop, which must follow all servers, leaves it to threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.text.tokenizer import listed_ends

_SAID = "an answer"
# A response of this many tokens is decoded in less time than a thread needs to be woken.
FEW_TOKENS = 128


class ResponseText(NamedTuple):
    """A response as `text`, without the tokens that end it and white space between these, and `raw`, with all tokens.
    Both have other special tokens that the model says, such as </think>."""

    text: str
    raw: str


class Texts:
    """Decodes responses. The tokenizer, its chat template and the generation_config.json of the model in `folder` name
    the tokens that end or fill a text. Call `close` at the end."""

    def __init__(self, tokenizer: Any, folder: Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(_ends(tokenizer, folder))
        self._blank: dict[int, bool] = {}
        # There is one thread, so requests are answered in their order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")

    def of(self, tokens: NDArray[np.int32] | Sequence[int]) -> ResponseText:
        """The text of the token ids (R,). Call it in a thread if there are many."""
        ids = np.asarray(tokens, np.int32).tolist()
        kept = len(ids)
        for place in range(len(ids) - 1, -1, -1):
            if ids[place] in self._ends:
                kept = place
            elif not self._is_blank(ids[place]):
                break
        raw = self.decode(ids)
        return ResponseText(raw if kept == len(ids) else self.decode(ids[:kept]), raw)

    async def later(self, tokens: NDArray[np.int32]) -> ResponseText:
        """The same. More than `FEW_TOKENS` are decoded in a thread while the event loop goes on."""
        if len(tokens) <= FEW_TOKENS:
            return self.of(tokens)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.of, tokens)

    def close(self) -> None:
        """Stop decoding. A second call does nothing."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, with special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not self.decode([token]).strip()
        return self._blank[token]


def _ends(tokenizer: Any, folder: Path | None) -> Iterable[int | None]:
    """The ids of the tokens that begin, end and fill texts, and of those that the template writes after an answer."""
    yield from (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    yield from listed_ends(folder) if folder is not None else ()
    if not getattr(tokenizer, "chat_template", None):
        return
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _SAID}]
    try:
        closing = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(_SAID)[2]
    except Exception:  # a template may raise any error
        return
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    yield from special.intersection(tokenizer(closing, add_special_tokens=False)["input_ids"])
