"""Holds a dialogue with one model or with several. It handles the commands, the history and Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dovetail.coordinator.data.text.chat_template import Message
from dovetail.protocol.errors import RunError
from dovetail.tools.serving.chat import DialogueTooLong, Replier, Sampling

HELP = "commands: /reset forgets the dialogue, /system TEXT sets the system prompt, /quit ends the chat\n"


class Screen(Protocol):
    """Shows replies while they grow."""

    def show(self, replies: Mapping[str, Iterator[str]]) -> dict[str, str]:
        """Show each model's reply, and return the texts. If Ctrl-C ends the replies, return the texts so far."""


class Dialogue:
    """The turns with one model. Each model remembers its own replies."""

    def __init__(self, model: Replier, sampling: Sampling, system: str | None, note: Callable[[str], None]) -> None:
        self._model, self._sampling, self._note = model, sampling, note
        self.system = system
        self.turns: list[Message] = []

    def reset(self) -> None:
        self.turns.clear()

    def messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, said: str) -> Iterator[str]:
        """Yields the pieces of the reply, without spaces at its beginning. A dialogue that is too long loses its first
        turns."""
        self.turns.append({"role": "user", "content": said})
        while True:
            begun = False
            try:
                # The stream is closed as soon as nobody wants the rest, so that the server stops generating.
                with closing(self._stream()) as pieces:
                    for piece in pieces:
                        shown = piece if begun else piece.lstrip()
                        begun = begun or bool(shown)
                        if shown:
                            yield shown
                return
            except DialogueTooLong:
                if begun or len(self.turns) < 3:
                    raise
                del self.turns[:2]
                self._note("(the dialogue was too long; its first turn is forgotten)\n")

    def answered(self, text: str) -> None:
        """Remember the reply."""
        self.turns.append({"role": "assistant", "content": text.strip()})

    def forget_question(self) -> None:
        """Forget the question after a reply that failed, so that it can be asked again."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def _stream(self) -> Any:
        return self._model.reply(self.messages(), self._sampling)


def converse(
    models: Mapping[str, Replier],
    lines: Iterator[str],
    write: Callable[[str], None],
    sampling: Sampling,
    screen: Screen,
    system: str | None = None,
    tell: Callable[[RunError], None] | None = None,
) -> None:
    """Answer each line until the lines end or one is /quit. With `tell`, an error of a reply is shown and the chat
    continues. Without it the error is raised."""
    dialogues = {name: Dialogue(model, sampling, system, write) for name, model in models.items()}
    for line in lines:
        said = line.strip()
        if not said:
            continue
        if said in ("/quit", "/exit"):
            return
        if said == "/reset":
            for dialogue in dialogues.values():
                dialogue.reset()
            write("(the dialogue starts anew)\n")
        elif said == "/system" or said.startswith("/system "):
            text = said.removeprefix("/system").strip() or None
            for dialogue in dialogues.values():
                dialogue.system = text
            write("(the system prompt is set)\n" if text else "(there is no system prompt)\n")
        elif said.startswith("/"):
            write(HELP)
        else:
            try:
                found = screen.show({name: dialogue.ask(said) for name, dialogue in dialogues.items()})
            except RunError as error:
                for dialogue in dialogues.values():
                    dialogue.forget_question()
                if tell is None:
                    raise
                tell(error)
            else:
                for name, text in found.items():
                    dialogues[name].answered(text)


class PlainScreen:
    """Shows one reply after the other as text. If there are several models, the model's name comes before its reply."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def show(self, replies: Mapping[str, Iterator[str]]) -> dict[str, str]:
        found = dict.fromkeys(replies, "")
        try:
            for name, pieces in replies.items():
                if len(replies) > 1:
                    self._write(f"{name}: ")
                for piece in pieces:
                    found[name] += piece
                    self._write(piece)
                self._write("\n")
        except KeyboardInterrupt:
            self._write("\n(stopped)\n")
        finally:
            _close(replies)
        return found


class ColumnScreen:
    """Shows the replies of several models side by side while they grow."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, replies: Mapping[str, Iterator[str]]) -> dict[str, str]:
        found = dict.fromkeys(replies, "")
        errors: list[BaseException] = []
        stop = threading.Event()

        def read(name: str, pieces: Iterator[str]) -> None:
            try:
                for piece in pieces:
                    found[name] += piece
                    if stop.is_set():
                        return
            except BaseException as error:
                errors.append(error)
            finally:
                _close({name: pieces})

        threads = [threading.Thread(target=read, args=item, daemon=True) for item in replies.items()]
        stopped = False
        with Live(self._table(found), console=self._console, refresh_per_second=10) as live:
            for thread in threads:
                thread.start()
            try:
                while any(thread.is_alive() for thread in threads):
                    for thread in threads:
                        thread.join(0.05)
                    live.update(self._table(found))
            except KeyboardInterrupt:
                stopped = True
                stop.set()
                for thread in threads:
                    thread.join(10.0)
            live.update(self._table(found))
        if stopped:
            self._console.print("(stopped)")
        elif errors:
            raise errors[0]
        return found

    def _table(self, texts: Mapping[str, str]) -> Table:
        table = Table(expand=True, show_lines=False)
        for name in texts:
            table.add_column(name, ratio=1, overflow="fold")
        table.add_row(*(Text(text) for text in texts.values()))
        return table


def _close(replies: Mapping[str, Any]) -> None:
    for pieces in replies.values():
        close = getattr(pieces, "close", None)
        if close is not None:
            close()


def typed_lines(read: Callable[[], str], write: Callable[[str], None]) -> Iterator[str]:
    """Yields the lines that a person types, until Ctrl-D. Ctrl-C drops the line that is being typed."""
    while True:
        try:
            yield read()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n(Ctrl-D or /quit ends the chat)\n")
