"""The text of responses. Decoding a long response takes milliseconds, and an iteration may have thousands of them. So
the event loop, which must follow all servers, leaves it to threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Texts:
    """Decodes responses, without special tokens. Call `close` at the end."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # There is one thread, so requests are answered in their order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")

    def of(self, tokens: NDArray[np.int32]) -> str:
        """The text of the token ids (R,). Call it in a thread."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    async def later(self, tokens: NDArray[np.int32]) -> str:
        """The same, computed in a thread while the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.of, tokens)

    def close(self) -> None:
        """Stop decoding. A second call does nothing."""
        self._thread.shutdown(wait=False, cancel_futures=True)
