"""A model that replies in this process, with transformers. It must be small enough for this machine. transformers is
only imported when a chat starts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dovetail.coordinator.data.text.chat_template import Message, chat_format
from dovetail.protocol.errors import RunError
from dovetail.tools.serving.served_result import model_folder

# These strings end a reply in the dialogue format of Anthropic's HH data, which the built-in data uses too.
REPLY_ENDS = ("\n\nHuman:", "\n\nAssistant:")


@dataclass(frozen=True)
class Sampling:
    """Settings for replies. Temperature 0 always takes the most likely token."""

    max_tokens: int = 128
    temperature: float = 0.7


class DialogueTooLong(RunError):
    """The dialogue has more tokens than the model allows."""


class Replier(Protocol):
    """A model to talk with."""

    def reply(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]:
        """Yields the pieces of the assistant's next reply as they are generated. Closing the iterator ends the reply.
        Raises RunError."""


def until_stop(pieces: Iterable[str], stops: tuple[str, ...] = REPLY_ENDS) -> Iterator[str]:
    """Yields the pieces of a text before the first stop string. A stop string may span several pieces."""
    held = ""
    longest = max(len(stop) for stop in stops)
    for piece in pieces:
        held += piece
        found = [at for stop in stops if (at := held.find(stop)) >= 0]
        if found:
            yield held[: min(found)]
            return
        # Keep back what may be the beginning of a stop string.
        keep = next(
            (n for n in range(min(longest, len(held)), 0, -1) if any(stop.startswith(held[-n:]) for stop in stops)), 0
        )
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    yield held


class ChatModel:
    """A Hugging Face causal language model of a run. Raises RunError if the run has no such model."""

    def __init__(self, run_dir: Path, name: str = "actor", iteration: int | None = None) -> None:
        folder = model_folder(run_dir, name, iteration)
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        tokenizer = run_dir / "tokenizer"
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer if tokenizer.is_dir() else folder)
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
        except (OSError, ValueError) as error:
            raise RunError(f"cannot load the model in {folder}: {error}") from error
        self._model.eval()

    def prompt(self, messages: Sequence[Message]) -> str:
        """The dialogue as in training, with its special tokens. Raises RunError if the chat template refuses it."""
        try:
            return chat_format(self._tokenizer).prompt(messages)
        except ValueError as error:
            raise RunError(f"the tokenizer's chat template refuses the dialogue: {error}") from error

    def reply(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[str]:
        """See `Replier`. A dialogue that is too long loses its first tokens."""
        from transformers import StoppingCriteriaList, TextIteratorStreamer

        limit = int(getattr(self._model.config, "max_position_embeddings", 0) or 0)
        ids = self._tokenizer(self.prompt(messages), return_tensors="pt", add_special_tokens=False)["input_ids"]
        room = max(1, limit - sampling.max_tokens) if limit else ids.shape[1]
        ids = ids[:, -room:]
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120.0)
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            options = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        failure: list[BaseException] = []
        stop = threading.Event()

        def generate() -> None:
            try:
                self._model.generate(
                    input_ids=ids,
                    attention_mask=ids.new_ones(ids.shape),
                    max_new_tokens=sampling.max_tokens if not limit else min(sampling.max_tokens, limit - 1),
                    pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id or 0,
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([lambda *_: stop.is_set()]),
                    **options,
                )
            except BaseException as error:
                failure.append(error)
                streamer.end()

        thread = threading.Thread(target=generate, name="generate", daemon=True)
        thread.start()
        try:
            yield from until_stop(streamer)
        finally:
            stop.set()
            thread.join(10.0)
        if failure:
            raise RunError(f"the model could not reply: {failure[0]}")
