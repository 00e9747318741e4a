"""Puts together an iteration's experience from the samples in the store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.data.text.texts import Texts
from dovetail.coordinator.rewards.calls import Calls
from dovetail.coordinator.store.experience_files import experience_arrays
from dovetail.coordinator.store.samples import Sample, SampleTable
from dovetail.coordinator.store.step_rewards import step_arrays
from dovetail.coordinator.store.store import StoreError
from dovetail.protocol.experience import Experience
from dovetail.protocol.wire import Arrays


class ExperienceAssembly:
    """It only reads the store. Thousands of long samples take seconds, so call its methods in a thread.

    `pad` is the token that fills short rows. `calls` has the job's reward functions. It is None if a reward model gives
    the rewards."""

    def __init__(self, samples: SampleTable, texts: Texts, pad: int, calls: Calls | None) -> None:
        self._samples, self._texts, self._pad, self._calls = samples, texts, pad, calls

    def arrays_of(self, iteration: int, samples: Sequence[Sample]) -> Arrays:
        """The arrays of some of an iteration's samples, which are scored."""
        experts = self._samples.experts(iteration, sorted({s.key.prompt for s in samples}))
        arrays = experience_arrays(samples, self._pad, experts)
        if self._calls is not None:
            weights = {function.title: function.weight for function in self._calls.functions}
            arrays |= step_arrays(samples, self._samples.steps(iteration), weights, self._text)
        return arrays

    def experience(self, iteration: int, version: int, prompts: Sequence[PromptRecord]) -> Experience:
        """The experience of an iteration whose samples are all scored. `version` is the version of the weights that
        must have drawn them. `prompts` has the prompts by position. Raises StoreError."""
        samples = self._samples.experience(iteration)
        for held in (v for s in samples for v in (s.first_version, s.weight_version)):
            if held is not None and held != version:
                raise StoreError(f"samples of iteration {iteration} are of weight version {held}, not {version}")
        said = [self._texts.of(s.tokens) for s in samples]
        return Experience(
            iteration=iteration,
            prompts=[prompts[s.key.prompt].text for s in samples],
            responses=[each.text for each in said],
            arrays=self.arrays_of(iteration, samples),
            fields=[s.fields for s in samples],
            raw=[each.raw for each in said],
        )

    def _text(self, tokens: NDArray[np.int32]) -> str:
        return self._texts.of(tokens).text
