"""Probes whether a vLLM server serves the weights that it was sent. It is asked for the log-probabilities of a few
tokens, which are compared with the trainers' of the same version. Until it has passed, it answers nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from dovetail.coordinator.weights.offers import ReceiverError, post
from dovetail.protocol.messages import Probe
from dovetail.protocol.probe import HEADER

PROBE_SECONDS = 60.0
# vLLM's header that chooses the data-parallel engine.
ENGINE = "X-data-parallel-rank"
# Mean of absolute differences, in nats; of the coarser of trainers and server. Rounding of bfloat16 gives up to 0.1
# with tokens drawn at random, which are unlikely ones; weights of another version of the model several nats.
TOLERANCE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.5}
QUANTISED_TOLERANCE = 2.0


@dataclass(frozen=True)
class ProbedServer:
    """What a probe needs to know of a server: its longest sequence in tokens, the dtype of its weights (None: they are
    quantised, or it does not say), and the number of its data-parallel engines. Each engine has weights of its own."""

    url: str
    max_model_len: int | None = None
    dtype: str | None = None
    engines: int = 1


def tolerance(trainers: str, server: str | None) -> float:
    """The largest allowed difference in nats, by the dtypes of server and trainer."""
    return max(TOLERANCE.get(dtype, QUANTISED_TOLERANCE) for dtype in (trainers, server or ""))


def verdict(probe: Probe, answered: Sequence[float], server: str | None) -> str | None:
    """One sentence on what is wrong with a server's log-probabilities, or None. They may be of the probe's first tokens
    only."""
    expected = probe.logprobs[: len(answered)]
    gaps = [abs(a - b) for a, b in zip(answered, expected, strict=True)]
    limit = tolerance(probe.dtype, server)
    mean = math.fsum(gaps) / len(gaps)
    if mean <= limit:  # not so where one is not a number
        return None
    return (
        f"it does not serve the weights of version {probe.version}: its log-probabilities of {len(gaps)} tokens differ "
        f"from the trainers' by {mean:.3g} on average and {max(gaps):.3g} at most (limit {limit:g} in "
        f"{server or 'its dtype'}; server {_some(answered)}, trainers {_some(expected)}); it gets no samples"
    )


async def prove(session: aiohttp.ClientSession, server: ProbedServer, probe: Probe | None, version: int) -> None:
    """Probe a server that has taken `version`, and let it serve that version. Raises ReceiverError with one sentence if
    the server fails the probe; it then still refuses to generate."""
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
            headers = {HEADER: str(version)} | ({ENGINE: str(engine)} if server.engines > 1 else {})
            reply = await post(session, f"{base}/inference/v1/generate", PROBE_SECONDS, body, headers)
            answered = read_logprobs(reply, tokens)
            if answered and (problem := verdict(probe, answered, server.dtype)) is not None:
                raise ReceiverError(problem)
    await post(session, f"{base}/dovetail/serve", PROBE_SECONDS, {"weight_version": version})


def read_logprobs(reply: Any, tokens: Sequence[int]) -> list[float]:
    """The log-probabilities of tokens[1:] in vLLM's answer. Raises ReceiverError if the answer has none."""
    try:
        rows = reply["prompt_logprobs"]
        return [float(rows[i][str(token)]["logprob"]) for i, token in enumerate(tokens) if i]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ReceiverError(
            f"it answered the probe of its weights without log-probabilities of the prompt ({type(error).__name__})"
        ) from error


def _some(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values[:3]) + (", ..." if len(values) > 3 else "")
