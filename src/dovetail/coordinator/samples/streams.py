"""Keeps track of the scorer that has computed each part of each unfinished sample. It does no I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dovetail.coordinator.store.samples import Key
from dovetail.protocol.budgets import RESPONSE_BLOCK

# The maximum number of tokens that a scorer computes in one request for parts of samples, unless a single sample has
# more. A sample that is finished meanwhile waits for it.
LOOK_TOKENS = 256


@dataclass(frozen=True)
class Growing:
    """A sample that is being generated. It has the token ids of its prompt, and of its response so far."""

    key: Key
    prompt: Sequence[int]
    response: Sequence[int]

    @property
    def blocks(self) -> int:
        """The number of response tokens that scorers may compute. It is a whole number of blocks, and never includes
        the last token."""
        return max(0, len(self.response) - 1) // RESPONSE_BLOCK * RESPONSE_BLOCK


@dataclass
class _Home:
    """The home of a sample, which is the scorer that has computed a part of it. `scorer` is its name and incarnation.
    It has computed `held` response tokens. `prompt` is the number of prompt tokens."""

    scorer: tuple[str, str]
    prompt: int
    held: int = 0


class Streams:
    """The homes of unfinished samples, and of finished ones until they are scored."""

    def __init__(self) -> None:
        self._homes: dict[Key, _Home] = {}

    def home(self, key: Key) -> tuple[str, str] | None:
        """The name and incarnation of the scorer that has computed a part of the sample. None if there is none."""
        found = self._homes.get(key)
        return None if found is None or not found.held else found.scorer

    def seen(self, key: Key) -> int:
        """The number of tokens of the sample's prompt and response that its home has computed."""
        found = self._homes.get(key)
        return found.prompt + found.held if found is not None and found.held else 0

    def held(self, scorer: tuple[str, str], key: Key, prompt: int, tokens: int) -> None:
        """Record that a scorer has computed `tokens` response tokens of a sample with `prompt` prompt tokens. It
        records nothing if the sample was ended since `take` gave it to this scorer."""
        found = self._homes.get(key)
        if found is None or found.scorer != scorer:
            return
        if tokens:
            self._homes[key] = _Home(scorer, prompt, tokens)
        else:
            self.end([key])

    def end(self, keys: Collection[Key]) -> None:
        """Forget the homes of these samples, because they are scored, or because any scorer may score them."""
        for key in keys:
            self._homes.pop(key, None)

    def stay(self, scorers: Collection[tuple[str, str]]) -> None:
        """Forget all scorers but these."""
        self.end([key for key, home in self._homes.items() if home.scorer not in scorers])

    def take(
        self, scorer: tuple[str, str], room: int, growing: Sequence[Growing], idle: int, least: int = 1
    ) -> list[Growing]:
        """The samples that a scorer computes next, the longest first. Each has a new block, and at least `least` tokens
        that no scorer has computed. The scorer gets the samples whose home it is, and its share of those without a
        home, as one of `idle` scorers. The tokens that it keeps then stay within `room`. The request has at most
        `LOOK_TOKENS` tokens, or one sample."""
        alone = [g for g in growing if g.key not in self._homes and g.blocks]
        new = sorted(alone, key=lambda g: (-len(g.response), g.key))[: -(-len(alone) // max(1, idle))]
        own = [g for g in growing if (home := self._homes.get(g.key)) is not None and home.scorer == scorer]
        chosen: list[Growing] = []
        work = 0
        for each in sorted([*own, *new], key=lambda g: (-len(g.response), g.key)):
            home = self._homes.get(each.key)
            held = 0 if home is None else home.held
            before = len(each.prompt)
            if before + max(held, each.blocks) > room:
                # It makes room for longer samples, and any scorer may take it.
                self.end([each.key])
                continue
            room -= before + max(held, each.blocks)
            tokens = each.blocks - held + (0 if held else before)
            if each.blocks > held and tokens >= least and (not chosen or work + tokens <= LOOK_TOKENS):
                chosen.append(each)
                work += tokens
        for each in chosen:
            self._homes.setdefault(each.key, _Home(scorer, len(each.prompt)))
        return chosen
