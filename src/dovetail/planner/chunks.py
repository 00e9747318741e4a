"""Decides how many samples are scored together. The coordinator and the simulator share these rules."""

from __future__ import annotations

MAX_CHUNK_TOKENS = 16_384
# Smaller chunks cost as much: the fixed costs (a request, reading the weights of three models) prevail.
MIN_CHUNK_TOKENS = 512
CHUNKS_PER_SCORER = 3
# The number of unfinished samples for each scorer that are scored while they are generated. With more, a prompt would
# be computed again for each of its samples, long before the last one ends.
STREAMED_PER_SCORER = 2


def chunk_target(waiting: int, scorers: int, least: int = MIN_CHUNK_TOKENS, most: int = MAX_CHUNK_TOKENS) -> int:
    """The most tokens of the next chunk of one of `scorers` scorers, padded to its longest sample. A chunk always has
    at least one sample.

    It is about a third of a scorer's share of the `waiting` tokens, but at least `least` tokens and at most `most`. The
    last chunks are small, so all scorers end at about the same time. Where the shortest samples come first, each
    further sample makes all rows longer."""
    return min(most, max(least, waiting // max(1, scorers * CHUNKS_PER_SCORER)))
