"""Which scorer has seen how much of which unfinished sample. Pure.

A scorer keeps the keys and values of what it has seen (`dovetail.rollout.scoring.prefixes`). So a sample stays with one
scorer, its home, from its first block to its end. Nothing depends on it but time: a sample that has lost its home is
scored from its first token on by another one, with the same bits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dovetail.coordinator.store.samples import Key

# Response tokens of a block: see RESPONSE_BLOCK in `dovetail.models.packing`, which needs torch.
BLOCK_TOKENS = 64
# What a scorer looks at in one request, unless one sample has more. A sample that is finished meanwhile waits for it.
LOOK_TOKENS = 256


@dataclass(frozen=True)
class Growing:
    """A sample that is being generated: the token ids of its prompt and of its response so far."""

    key: Key
    prompt: Sequence[int]
    response: Sequence[int]

    @property
    def blocks(self) -> int:
        """Response tokens that scorers may see: whole blocks, and never the last token."""
        return max(0, len(self.response) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass
class _Home:
    """`scorer`: name and incarnation. `held`: response tokens that it has seen, of a prompt of `prompt` tokens."""

    scorer: tuple[str, str]
    prompt: int
    held: int = 0


class Streams:
    """The homes of unfinished samples, and of finished ones until they are scored."""

    def __init__(self) -> None:
        self._homes: dict[Key, _Home] = {}

    def home(self, key: Key) -> tuple[str, str] | None:
        """Name and incarnation of the scorer that has seen a part of the sample."""
        found = self._homes.get(key)
        return None if found is None or not found.held else found.scorer

    def seen(self, key: Key) -> int:
        """Tokens of the sample's prompt and response that its home has seen."""
        found = self._homes.get(key)
        return found.prompt + found.held if found is not None and found.held else 0

    def held(self, scorer: tuple[str, str], key: Key, prompt: int, tokens: int) -> None:
        """A scorer says how many of its response tokens it has seen."""
        if tokens:
            self._homes[key] = _Home(scorer, prompt, tokens)
        else:
            self.end([key])

    def end(self, keys: Collection[Key]) -> None:
        """Forget the homes of these samples: they are scored, or will be by any scorer."""
        for key in keys:
            self._homes.pop(key, None)

    def stay(self, scorers: Collection[tuple[str, str]]) -> list[Key]:
        """Forget all scorers but these. Returns the samples that had a home."""
        lost = [key for key, home in self._homes.items() if home.scorer not in scorers]
        self.end(lost)
        return lost

    def take(
        self, scorer: tuple[str, str], room: int, growing: Sequence[Growing], idle: int, least: int = 1
    ) -> list[Growing]:
        """What a scorer looks at next: samples with a new block and at least `least` tokens that nobody has seen, its
        own ones and its part (one of `idle` scorers takes it) of those without a home, the longest first. What it has
        seen then stays within `room` tokens, and it is not busy for long: with `LOOK_TOKENS` tokens, or one sample."""
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
                # It makes room for longer ones, and any scorer may take it.
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
