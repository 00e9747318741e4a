"""Coefficient of the KL penalty: fixed, or adaptive (Ziegler et al. 2019, section 2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.manifest.types import KL

ERROR_LIMIT = 0.2


@dataclass
class KLController:
    """Holds `coef`; with a `target` (KL per sample, nats, summed over its tokens) `update` steers towards it.

    The KL is k1, whichever estimator the penalty uses, and wherever it is (`kl.in`). verl steers the token mean: its
    targets are lower by the response length. `coef` is the whole state: a controller made anew with the saved
    coefficient goes on as before."""

    coef: float
    target: float | None = None
    horizon: int = 10_000

    @staticmethod
    def from_config(config: KL, coef: float | None = None) -> KLController:
        """From `spec.ppo.kl`; `coef` is a checkpoint's."""
        return KLController(config.coef if coef is None else coef, config.target, config.horizon)

    def update(self, kl: float, samples: int) -> float:
        """Take in an iteration's mean KL per sample over `samples` samples; return the next coefficient.

        error = clip(kl / target - 1, -0.2, 0.2); coef *= 1 + error * samples / horizon, where samples /
        horizon is at most 1 (else a large batch could make the coefficient negative). A fixed coefficient
        does not change, nor does any by a KL that is not finite."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
            self.coef *= 1.0 + error * min(samples / self.horizon, 1.0)
        return self.coef
