"""The coefficient of the KL penalty. It is fixed or adaptive (Ziegler et al. 2019, section 2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.manifest.types import KL

ERROR_LIMIT = 0.2


@dataclass
class KLController:
    """Holds the KL coefficient `coef`. With a `target` (KL per sample in nats, summed over its tokens), `update` adapts
    `coef` to reach the target. `horizon` is a number of samples.

    The KL is always the k1 estimate, whatever `kl.in` and the penalty's estimator are. verl's controller uses the mean
    over tokens, so its targets are smaller by the factor of the response length. `coef` is the whole state. A new
    controller with the saved coefficient continues like the old one."""

    coef: float
    target: float | None = None
    horizon: int = 10_000

    @staticmethod
    def from_config(config: KL, coef: float | None = None) -> KLController:
        """The controller for `spec.ppo.kl`. `coef` is the coefficient of a checkpoint. If it is None, the manifest's is
        used."""
        return KLController(config.coef if coef is None else coef, config.target, config.horizon)

    def update(self, kl: float, samples: int) -> float:
        """Adapt the coefficient to an iteration's mean KL per sample (nats) over `samples` samples. Returns the new
        coefficient.

        error = clip(kl / target - 1, -0.2, 0.2); coef *= 1 + error * samples / horizon. Here samples / horizon is at
        most 1, because a large batch could otherwise make the coefficient negative. A fixed coefficient does not
        change. A KL that is not finite changes nothing."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
            self.coef *= 1.0 + error * min(samples / self.horizon, 1.0)
        return self.coef
