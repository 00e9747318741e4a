"""How many samples are scored together: the coordinator's rules, and the simulator's."""

from __future__ import annotations

MAX_CHUNK_TOKENS = 16_384
# Below this a chunk's fixed costs (a request, three models' layers or weights) are what it costs.
MIN_CHUNK_TOKENS = 512
CHUNKS_PER_SCORER = 3
# So many unfinished samples for each scorer are scored while they are generated. With more, prompts would be computed
# for one sample each, long before the last one ends.
STREAMED_PER_SCORER = 2


def chunk_rows(
    longest: int, waiting: int, scorers: int, least: int = MIN_CHUNK_TOKENS, most: int = MAX_CHUNK_TOKENS
) -> int:
    """How many of the waiting samples, longest first, are the next chunk of one of `scorers` scorers.

    Padded to `longest` tokens, the chunk has about a third of a scorer's share of the `waiting` tokens. It has at
    least `least` tokens if so many wait, and at most `most` (or one sample). The last chunks are small, so all
    scorers end at about the same time."""
    target = min(most, max(least, waiting // max(1, scorers * CHUNKS_PER_SCORER)))
    return max(1, target // longest)
