"""Loads the advantage function that a manifest names (`spec.ppo.advantageFunction`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.manifest.callables import FunctionError, load_callable, time_limit
from dovetail.manifest.training_types import PPO
from dovetail.protocol.experience import AdvantageFunction, Experience, FloatArray, advantages_of
from dovetail.protocol.process.pulse import PROGRESS
from dovetail.protocol.wire import Arrays

FIELD = "spec.ppo.advantageFunction"
# It takes an Experience and returns advantages and returns, each (N, R) float32. It raises FunctionError.
UserAdvantages = Callable[[Experience], tuple[FloatArray, FloatArray | None]]


def load_advantages(config: PPO) -> UserAdvantages | None:
    """The function of `spec.ppo`. It is looked for in `importPath` (default: the working directory), then on
    PYTHONPATH. It is None if the job has none. Raises ValueError with one sentence if it cannot be imported."""
    name = config.advantage_function
    if name is None:
        return None
    try:
        with PROGRESS.bounded(), time_limit(config.timeout_seconds, FIELD, name):
            function: AdvantageFunction = load_callable(name, FIELD, config.import_path)
    except TimeoutError as error:
        raise FunctionError.raised(FIELD, name, error) from error

    def call(experience: Experience) -> tuple[FloatArray, FloatArray | None]:
        raised: list[Exception] = []

        def tried(experience: Experience) -> object:
            try:
                with PROGRESS.bounded(), time_limit(config.timeout_seconds, FIELD, name):
                    return function(experience)
            except Exception as error:
                raised.append(error)
                raise

        try:
            return advantages_of(tried, experience, f"{FIELD}: {name}")
        except MemoryError:
            raise
        except Exception as error:
            if raised:
                raise FunctionError.raised(FIELD, name, raised[0]) from error
            raise FunctionError(str(error)) from error

    return call


def rehearse_advantages(config: PPO) -> None:
    """Call the function on made-up samples of two prompts, so that its errors show before training starts.

    Raises ValueError with one sentence."""
    function = load_advantages(config)
    if function is None:
        return
    count, width = 2 * config.samples_per_prompt, 3
    lengths = np.arange(count, dtype=np.int32) % width + 1
    table = -0.1 - 0.01 * np.arange(count * width, dtype=np.float32).reshape(count, width)
    arrays: Arrays = {
        "tokens": np.ones((count, width + 1), np.int32),
        "prompt_lengths": np.ones(count, np.int32),
        "response_lengths": lengths,
        "rollout_logprobs": table,
        "old_logprobs": table,
        "ref_logprobs": table - np.float32(0.01),
        "scores": np.arange(count, dtype=np.float32),
        "groups": np.repeat(np.arange(2, dtype=np.int32), config.samples_per_prompt),
        "finished": np.ones(count, np.uint8),
    }
    if config.advantage == "gae":
        arrays["values"] = np.zeros((count, width), np.float32)
    function(Experience(1, [], [], arrays, config=config, kl_coef=config.kl.coef))
