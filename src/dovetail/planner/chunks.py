"""Decides how many samples are scored together. The coordinator and the simulator share these rules."""

from __future__ import annotations

MAX_CHUNK_TOKENS = 16_384
# Smaller chunks cost as much: the fixed costs (a request, reading the weights of three models) prevail.
MIN_CHUNK_TOKENS = 512
CHUNKS_PER_SCORER = 3
# The number of unfinished samples for each scorer that are scored while they are generated. With more, a prompt would
# be computed again for each of its samples, long before the last one ends.
STREAMED_PER_SCORER = 2


def chunk_rows(
    longest: int, waiting: int, scorers: int, least: int = MIN_CHUNK_TOKENS, most: int = MAX_CHUNK_TOKENS
) -> int:
    """The number of waiting samples, longest first, that make up the next chunk of one of `scorers` scorers.

    `longest`, `waiting`, `least`, `most`: tokens. Padded to `longest` tokens, the chunk has about a third of a scorer's
    share of the `waiting` tokens. It has at least `least` tokens if so many wait, and at most `most`, but always one
    sample. The last chunks are small, so all scorers end at about the same time."""
    return max(1, chunk_target(waiting, scorers, least, most) // longest)


def chunk_target(waiting: int, scorers: int, least: int = MIN_CHUNK_TOKENS, most: int = MAX_CHUNK_TOKENS) -> int:
    """The most tokens of a padded chunk of several samples: see `chunk_rows`. Where the shortest samples come first,
    each further sample makes all rows longer."""
    return min(most, max(least, waiting // max(1, scorers * CHUNKS_PER_SCORER)))
