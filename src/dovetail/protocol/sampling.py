"""The fields of a sample's request that are vLLM's SamplingParams, and the seeds of samples. The coordinator writes
them, and rollouts read them.

Two samplers draw the same sample for the same (seed, position) on every server. So another server can continue a
response from the prompt and the tokens so far:

    - `counter`: `dovetail.rollout.serving.sampler.CounterSampler`, a logits processor of vLLM's V1 runner (CPUs);
    - `native`: the seeded sampler of vLLM's V2 runner (GPUs), which uses the absolute position itself.

A server reports which one it has."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from dovetail.manifest.training_types import Generation
from dovetail.manifest.types import RLHFJobSpec

Sampler = Literal["counter", "native"]

# The value of vLLM's --logits-processors.
COUNTER_SAMPLER = "dovetail.rollout.serving.sampler:CounterSampler"
SEED = "dt_seed"
TEMPERATURE = "dt_temperature"
TOP_K = "dt_top_k"
TOP_P = "dt_top_p"

# vllm.sampling_params.RequestOutputKind.DELTA: each streamed message holds only the new tokens.
OUTPUT_DELTA = 1


# This variable tells a server's workers the number by which the model's logits are divided (`served_temperature`).
SERVED_TEMPERATURE = "DOVETAIL_SERVED_TEMPERATURE"


def served_temperature(spec: RLHFJobSpec) -> float:
    """The temperature by which servers divide the model's logits, before all other steps. Servers report
    log-probabilities of these logits.

    They must be those of the policy that sampled, at its temperature, because the policy's ratio and the weights of
    importance sampling use them. So servers sample from the divided logits at temperature 1."""
    return spec.generation.temperature


def asked_of_servers(spec: RLHFJobSpec, temperature: float | None = None) -> Generation:
    """`spec.generation` in the form for requests to servers. Its temperature is relative to the temperature that the
    servers apply. `temperature` replaces the job's temperature."""
    wanted = spec.generation.temperature if temperature is None else temperature
    return spec.generation.model_copy(update={"temperature": wanted / served_temperature(spec)})


def sampling_params(
    generation: Generation, seed: int, max_tokens: int, sampler: Sampler, *, generated: int = 0
) -> dict[str, Any]:
    """The `sampling_params` of one request as JSON. `max_tokens`: the number of tokens that this request may still
    generate. `generated`: the number of tokens that the sample already has from an earlier server. They count towards
    `generation.min_tokens`.

    Log-probabilities are vLLM's raw ones. They are those of the served model's distribution, before top-k and top-p.
    The temperature 0 always takes the most likely token. Raises ValueError if `max_tokens` < 1."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: a request must be allowed at least one token")
    params: dict[str, Any] = {
        "n": 1,
        "max_tokens": max_tokens,
        "min_tokens": max(0, min(generation.min_tokens - generated, max_tokens)),
        "logprobs": 0,
        "detokenize": bool(generation.stop),
        "skip_special_tokens": False,
        "output_kind": OUTPUT_DELTA,
    }
    if generation.stop:
        params["stop"] = list(generation.stop)
        # The policy also chose the tokens of the stop string, so they are sent back too.
        params["include_stop_str_in_output"] = True
    if generation.temperature == 0.0:
        params["temperature"] = 0.0
    elif sampler == "counter":
        # vLLM takes the request for greedy. The processor's noise makes its argmax an exact sample.
        params["temperature"] = 0.0
        params["extra_args"] = {
            SEED: seed,
            TEMPERATURE: generation.temperature,
            TOP_K: generation.top_k,
            TOP_P: generation.top_p,
        }
    else:
        params["temperature"] = generation.temperature
        params["top_p"] = generation.top_p
        params["top_k"] = generation.top_k
        params["seed"] = seed
    return params


def derived_seed(*key: int | str) -> int:
    """The 63-bit seed of a key: the first 8 bytes of its SHA-256, without the sign bit."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def sample_seed(job_seed: int, iteration: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one sample, 0 <= seed < 2**63. Every server draws the same tokens with it, at any time."""
    return derived_seed("sample", job_seed, iteration, prompt_index, sample_index)
