"""The coefficient of the KL penalty: fixed or adaptive (Ziegler et al. 2019, section 2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.manifest.types import KL

ERROR_LIMIT = 0.2


@dataclass
class KLController:
    """Holds `coef`. With a `target` (KL per sample in nats, summed over its tokens), `update` adapts `coef` to reach
    it.

    The KL is always k1, whatever the penalty's estimator and place (`kl.in`). verl's controller uses the mean over
    tokens, so its targets are smaller by the response length. `coef` is the whole state: a new controller with the
    saved coefficient goes on as the old one."""

    coef: float
    target: float | None = None
    horizon: int = 10_000

    @staticmethod
    def from_config(config: KL, coef: float | None = None) -> KLController:
        """A controller as `spec.ppo.kl` asks for it. `coef`: the coefficient in a checkpoint."""
        return KLController(config.coef if coef is None else coef, config.target, config.horizon)

    def update(self, kl: float, samples: int) -> float:
        """Adapt to an iteration's mean KL per sample, over `samples` samples. Returns the next coefficient.

        error = clip(kl / target - 1, -0.2, 0.2); coef *= 1 + error * samples / horizon, where samples /
        horizon is at most 1 (else a large batch could make the coefficient negative). A fixed coefficient
        does not change, nor does any by a KL that is not finite."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
            self.coef *= 1.0 + error * min(samples / self.horizon, 1.0)
        return self.coef
