"""Probes whether a vLLM server serves the weights that it was sent. The server is asked for the log-probabilities of a
few tokens. They are compared with the trainers' log-probabilities for the same version. Until it has passed, the server
answers no other requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from dovetail.coordinator.workers.offers import ReceiverError, post
from dovetail.protocol.messages import PROBE_HEADER, Probe

PROBE_SECONDS = 60.0
# This header of vLLM selects the data-parallel engine.
ENGINE = "X-data-parallel-rank"
# The largest mean absolute difference, in nats, for the coarser dtype of trainers and server. Rounding to bfloat16
# gives up to 0.1 with tokens drawn at random, which are unlikely. Weights of another version of the model give several
# nats.
TOLERANCE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.5}
QUANTISED_TOLERANCE = 2.0


@dataclass(frozen=True)
class ProbedServer:
    """The facts that a probe needs about a server. `max_model_len` is its longest sequence in tokens. `dtype` is the
    dtype of its weights. It is None if they are quantised or the server does not report it. `engines` is the number of
    its data-parallel engines, each with weights of its own."""

    url: str
    max_model_len: int | None = None
    dtype: str | None = None
    engines: int = 1


def tolerance(trainers: str, server: str | None) -> float:
    """The largest allowed difference in nats, for the dtypes of trainers and server."""
    return max(TOLERANCE.get(dtype, QUANTISED_TOLERANCE) for dtype in (trainers, server or ""))


def verdict(probe: Probe, answered: Sequence[float], server: str | None) -> str | None:
    """One sentence that says what is wrong with a server's log-probabilities (in nats), or None if they are right. They
    may cover only the first tokens of the probe."""
    expected = probe.logprobs[: len(answered)]
    gaps = [abs(a - b) for a, b in zip(answered, expected, strict=True)]
    limit = tolerance(probe.dtype, server)
    mean = math.fsum(gaps) / len(gaps)
    if mean <= limit:  # this is false if a value is NaN
        return None
    return (
        f"it does not serve the weights of version {probe.version}: its log-probabilities of {len(gaps)} tokens differ "
        f"from the trainers' by {mean:.3g} on average and {max(gaps):.3g} at most (limit {limit:g} in "
        f"{server or 'its dtype'}; server {_some(answered)}, trainers {_some(expected)}); it gets no samples"
    )


async def prove(session: aiohttp.ClientSession, server: ProbedServer, probe: Probe | None, version: int) -> None:
    """Probe a server that has taken `version`, and let it serve that version. Raises ReceiverError with one sentence if
    the server fails the probe. It then still refuses to generate."""
    base = server.url.rstrip("/")
    if probe is not None:
        most = len(probe.tokens) if server.max_model_len is None else server.max_model_len - 1
        tokens = probe.tokens[:most]
        body = {
            "model": "actor",
            "token_ids": tokens,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
        }
        for engine in range(server.engines):
            headers = {PROBE_HEADER: str(version)} | ({ENGINE: str(engine)} if server.engines > 1 else {})
            reply = await post(session, f"{base}/inference/v1/generate", PROBE_SECONDS, body, headers)
            answered = read_logprobs(reply, tokens)
            if answered and (problem := verdict(probe, answered, server.dtype)) is not None:
                raise ReceiverError(problem)
    await post(session, f"{base}/dovetail/serve", PROBE_SECONDS, {"weight_version": version})


def read_logprobs(reply: Any, tokens: Sequence[int]) -> list[float]:
    """The log-probabilities of tokens[1:], in nats, from vLLM's answer. Raises ReceiverError if the answer has none."""
    try:
        rows = reply["prompt_logprobs"]
        return [float(rows[i][str(token)]["logprob"]) for i, token in enumerate(tokens) if i]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ReceiverError(
            f"it answered the probe of its weights without log-probabilities of the prompt ({type(error).__name__})"
        ) from error


def _some(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values[:3]) + (", ..." if len(values) > 3 else "")
