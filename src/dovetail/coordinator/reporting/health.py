"""Judges whether an iteration's metrics can be trusted, and whether the policy still learns. Each verdict is one
sentence, which `HealthWatch` writes to the store, the log, the metrics and the status.

docs/health.md says what each verdict means, where its limit comes from and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import RLHFJobSpec

if TYPE_CHECKING:
    from prometheus_client import Gauge

# Rounding between bfloat16 engines gives about 0.01 nats per token. Different weights give far more.
MISMATCH_NATS = 0.05
# The quickstart, which learns well, goes from 0.68 nats per token to 0.41 and from a KL of 0 to 0.42 nats per token.
ENTROPY_LEAST_NATS = 0.01
ENTROPY_LEAST_SHARE = 0.1
ENTROPY_MOST_FACTOR = 2.0
ENTROPY_MOST_MORE_NATS = 1.0
KL_NATS_PER_TOKEN = 1.0
KL_JUMP = 3.0
KL_JUMP_FROM_NATS_PER_TOKEN = 0.3
FINISHED_SHARE = 0.05
EQUAL_GROUPS_SHARE = 0.75
CLIPPED_SHARE = 0.2
EFFECTIVE_SHARE = 0.3
DISCARDED_SHARE = 0.1

MISMATCH = "LogProbMismatch"
NOT_FINITE = "NotFinite"
ENTROPY_COLLAPSED = "EntropyCollapsed"
ENTROPY_EXPLODED = "EntropyExploded"
KL_RUNAWAY = "KLRunaway"
TRUNCATED = "ResponsesTruncated"
RESPONSES_EQUAL = "ResponsesEqual"
REWARDS_EQUAL = "RewardsEqual"
GROUPS_EQUAL = "GroupRewardsEqual"
CLIPPED = "RewardsClipped"
STALE = "SamplesTooOld"
DISCARDED = "EpisodesDiscarded"
# The worst reason comes first.
REASONS = (
    MISMATCH,
    NOT_FINITE,
    KL_RUNAWAY,
    ENTROPY_COLLAPSED,
    ENTROPY_EXPLODED,
    TRUNCATED,
    RESPONSES_EQUAL,
    REWARDS_EQUAL,
    GROUPS_EQUAL,
    CLIPPED,
    STALE,
    DISCARDED,
)


class UnhealthyError(Exception):
    """The run ends because of an iteration's health. The message is one sentence for the user."""


@dataclass(frozen=True)
class Verdict:
    """A verdict on an iteration. `reason` is one of REASONS. `stops` says that the iteration's results cannot be
    trusted. The run then ends, whatever failurePolicy says."""

    reason: str
    message: str
    stops: bool = False

    def as_json(self) -> dict[str, str]:
        return {"reason": self.reason, "message": self.message}


@dataclass(frozen=True)
class Rules:
    """The properties of a job that decide which verdicts make sense.

    `exact` says that nothing random lies between rollouts and trainers, so a mismatch is an error. `grouped` says that
    advantages compare the samples of one prompt. `distils` says that the reference is a teacher. The policy may then
    begin far away from it, and rewards train nothing. `max_tokens` is the length of the longest response in tokens."""

    exact: bool = True
    grouped: bool = False
    distils: bool = False
    max_tokens: int = 0

    @staticmethod
    def of(spec: RLHFJobSpec) -> Rules:
        lora = spec.models.actor.lora
        return Rules(
            exact=lora is None or lora.dropout == 0.0,
            grouped=spec.ppo.compares_samples and spec.ppo.advantage_function is None,
            distils=spec.ppo.advantage == "distillation" and spec.ppo.advantage_function is None,
            max_tokens=spec.generation.max_tokens,
        )


def judge(
    metrics: Mapping[str, float], first: Mapping[str, float], previous: Mapping[str, float], rules: Rules
) -> list[Verdict]:
    """The verdicts on an iteration, the worst first. The list is empty if the iteration is healthy.

    `metrics` is its row of history.jsonl. `first` is the row of the first iteration that has an entropy, and `previous`
    that of the iteration before this one. Each is empty if there is none. A metric that is missing is not judged."""
    verdicts = [
        _mismatch(metrics, rules),
        _not_finite(metrics),
        None if rules.distils else _kl(metrics, previous),
        _entropy(metrics, first),
        _truncated(metrics, rules),
        _responses_equal(metrics),
        None if rules.distils else _groups_equal(metrics) if rules.grouped else _rewards_equal(metrics),
        _clipped(metrics),
        _stale(metrics),
        _discarded(metrics),
    ]
    return [verdict for verdict in verdicts if verdict is not None]


def kl_per_token(metrics: Mapping[str, float]) -> float | None:
    """The metric in nats. None if the row lacks it."""
    kl, length = metrics.get("kl"), metrics.get("response_length")
    if kl is None or not length or not math.isfinite(kl):
        return None
    return kl / length


def _mismatch(metrics: Mapping[str, float], rules: Rules) -> Verdict | None:
    found = metrics.get("mismatch_abs")
    if found is None or found <= MISMATCH_NATS:
        return None
    return Verdict(
        MISMATCH,
        f"rollouts and trainers disagree about the sampled tokens by {found:.3g} nats per token before the first update"
        f" (at most {MISMATCH_NATS} is rounding), so the servers do not serve the weights that are trained; look in the"
        " rollouts' logs for weights that failed to load, and at the groups' dtype and vllmArgs",
        stops=rules.exact,
    )


def _not_finite(metrics: Mapping[str, float]) -> Verdict | None:
    bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if not bad:
        return None
    named = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    return Verdict(
        NOT_FINITE,
        f"not finite: {named}; look at the rewards of this iteration's samples, and lower the learning rates",
    )


def _kl(metrics: Mapping[str, float], previous: Mapping[str, float]) -> Verdict | None:
    now, before = kl_per_token(metrics), kl_per_token(previous)
    if now is None:
        return None
    text = f"KL to the reference is {metrics['kl']:.3g} nats per sample, {now:.2g} per token"
    advice = "raise ppo.kl.coef or lower actorOptimizer.learningRate, and read some responses"
    if abs(now) > KL_NATS_PER_TOKEN:
        return Verdict(
            KL_RUNAWAY,
            f"{text} (healthy: at most {KL_NATS_PER_TOKEN:g}): the policy has left what the reference could say; "
            f"{advice}",
        )
    if before is not None and now > KL_JUMP_FROM_NATS_PER_TOKEN and now > KL_JUMP * abs(before):
        return Verdict(KL_RUNAWAY, f"{text}, over {KL_JUMP:g} times the {before:.2g} of the iteration before; {advice}")
    return None


def _entropy(metrics: Mapping[str, float], first: Mapping[str, float]) -> Verdict | None:
    now, begun = metrics.get("entropy"), first.get("entropy")
    if now is None or not math.isfinite(now):
        return None
    since = f", {begun:.3g} in the first iteration" if begun is not None else ""
    text = f"entropy is {now:.3g} nats per token{since}"
    if now < max(ENTROPY_LEAST_NATS, ENTROPY_LEAST_SHARE * (begun or 0.0)):
        return Verdict(
            ENTROPY_COLLAPSED,
            f"{text}: all samples of a prompt become the same, and nothing new is tried; raise ppo.entropyCoef or "
            "ppo.kl.coef, or lower actorOptimizer.learningRate",
        )
    if begun is not None and now > max(ENTROPY_MOST_FACTOR * begun, begun + ENTROPY_MOST_MORE_NATS):
        return Verdict(
            ENTROPY_EXPLODED,
            f"{text}: the policy turns into noise; lower actorOptimizer.learningRate or ppo.entropyCoef, and read some "
            "responses",
        )
    return None


def _truncated(metrics: Mapping[str, float], rules: Rules) -> Verdict | None:
    finished = metrics.get("finished_fraction")
    if finished is None or not finished < FINISHED_SHARE:
        return None
    which = "no response" if finished == 0 else f"only {finished:.1%} of the responses"
    return Verdict(
        TRUNCATED,
        f"{which} ended before generation.maxTokens ({rules.max_tokens}); raise it, set ppo.missingEosPenalty, or "
        "check that the tokenizer's end token is the one that the model learnt",
    )


def _responses_equal(metrics: Mapping[str, float]) -> Verdict | None:
    samples, distinct = metrics.get("samples", 0.0), metrics.get("distinct_responses")
    if distinct is None or samples < 2 or distinct > 1:
        return None
    return Verdict(
        RESPONSES_EQUAL,
        f"all {samples:.0f} responses are the same, so there is nothing to compare; look at the samples, at "
        "generation.temperature and at what the reward prefers",
    )


def _rewards_equal(metrics: Mapping[str, float]) -> Verdict | None:
    low, high = metrics.get("reward_min"), metrics.get("reward_max")
    # These do not include the rewards of steps.
    if low is None or low != high or metrics.get("samples", 0.0) < 2 or metrics.get("steps", 0.0) > 0:
        return None
    return Verdict(
        REWARDS_EQUAL,
        f"all rewards are {low:.4g}, so no response is better than another; look at the reward function or model, "
        "and at ppo.rewardClip",
    )


def _groups_equal(metrics: Mapping[str, float]) -> Verdict | None:
    share = metrics.get("equal_reward_groups")
    if share is None or share < EQUAL_GROUPS_SHARE:
        return None
    return Verdict(
        GROUPS_EQUAL,
        f"in {share:.0%} of the prompts all samples have the same reward (healthy: below {EQUAL_GROUPS_SHARE:.0%}), "
        "and nothing is learnt from those; choose prompts that are neither too easy nor too hard, more "
        "samplesPerPrompt, or a reward with finer steps",
    )


def _clipped(metrics: Mapping[str, float]) -> Verdict | None:
    share = metrics.get("reward_clipped", 0.0)
    if not share > CLIPPED_SHARE:
        return None
    return Verdict(
        CLIPPED,
        f"{share:.0%} of the rewards lie beyond ppo.rewardClip and count as it (healthy: at most {CLIPPED_SHARE:.0%}), "
        "so the best and the good look alike; raise it, or set it to null",
    )


def _stale(metrics: Mapping[str, float]) -> Verdict | None:
    share = metrics.get("effective_sample_size")
    if share is None or not share < EFFECTIVE_SHARE:
        return None
    return Verdict(
        STALE,
        f"the samples are {metrics.get('staleness', 0):.0f} iterations older than the policy and count as {share:.0%} "
        f"of their tokens (healthy: at least {EFFECTIVE_SHARE:.0%}), so little is learnt from them; lower ppo.lag or "
        "actorOptimizer.learningRate",
    )


def _discarded(metrics: Mapping[str, float]) -> Verdict | None:
    share = metrics.get("episodes_discarded", 0.0)
    if not share > DISCARDED_SHARE:
        return None
    causes = {name.partition("/")[2]: found for name, found in metrics.items() if name.startswith("discarded/")}
    told = ", ".join(f"{cause.replace('_', ' ')} {found:.0%}" for cause, found in sorted(causes.items()))
    return Verdict(
        DISCARDED,
        f"{share:.0%} of the episodes are not trained ({told}; healthy: at most {DISCARDED_SHARE:.0%}); the event "
        "episode.discarded in events.jsonl has the reason of each",
    )


FACT = "fact/health"  # the store's key of what summary.json says
TREND = ("entropy", "kl", "response_length")


class HealthWatch:
    """First `judge` an iteration, and then `note` the verdicts. The state is in the store. So a restart changes no
    verdict, and an iteration that is noted twice counts once.

    The summary's fact has the number of `iterations` judged, how many of them were `unhealthy`, and the last verdicts.
    For each reason it has the `first` and `last` iteration, their `count` and the last `message`."""

    def __init__(self, spec: RLHFJobSpec, store: Store, log: Callable[..., None], gauge: Gauge) -> None:
        self._rules = Rules.of(spec)
        self._stop = spec.failure_policy.on_unhealthy == "Stop"
        self._store = store
        self._log = log
        self._gauge = gauge
        for reason in REASONS:
            gauge.labels(reason).set(0)

    def judge(self, iteration: int, metrics: Mapping[str, float]) -> list[Verdict]:
        """Judge the iteration. Returns the verdicts, the worst first. It stores nothing."""
        before = self._trend(iteration)
        return judge(metrics, before["first"], before["previous"], self._rules)

    def note(self, iteration: int, metrics: Mapping[str, float], verdicts: list[Verdict]) -> dict[str, Any]:
        """Store the verdicts, and log those that are new. Returns the field `health` of the status."""
        fact = self._store.get(FACT) or {"iterations": 0, "unhealthy": 0, "verdicts": [], "reasons": {}}
        earlier = {entry["reason"] for entry in fact["verdicts"]}
        for verdict in verdicts:
            if verdict.reason not in earlier:
                self._log("health.unhealthy", iteration=iteration, **verdict.as_json())
        now = {verdict.reason for verdict in verdicts}
        for reason in sorted(earlier - now):
            self._log("health.recovered", iteration=iteration, reason=reason)
        again = iteration <= fact["iterations"]
        fact["iterations"] = max(iteration, fact["iterations"])
        fact["unhealthy"] += bool(verdicts) and not again
        fact["verdicts"] = [{"iteration": iteration, **verdict.as_json()} for verdict in verdicts]
        for verdict in verdicts:
            known = fact["reasons"].setdefault(verdict.reason, {"first": iteration, "last": 0, "count": 0})
            known["count"] += iteration > known["last"]
            known |= {"last": max(iteration, known["last"]), "message": verdict.message}
        row = {name: metrics[name] for name in TREND if name in metrics}
        trend = self._trend(iteration)
        first = trend["first"] or (row if "entropy" in row else {})
        self._store.put_all(
            {FACT: fact, "health/trend": {"first": first, "previous": trend["previous"], "last": [iteration, row]}}
        )
        for reason in REASONS:
            self._gauge.labels(reason).set(reason in now)
        return {"iteration": iteration, "verdicts": [verdict.as_json() for verdict in verdicts]}

    def status(self) -> dict[str, Any]:
        """The field `health` of the status after a restart. It is that of the last iteration, and empty before the
        first."""
        fact = self._store.get(FACT)
        if not fact:
            return {}
        told = [{"reason": v["reason"], "message": v["message"]} for v in fact["verdicts"]]
        for verdict in told:
            self._gauge.labels(verdict["reason"]).set(1)
        return {"iteration": fact["iterations"], "verdicts": told}

    def check(self, iteration: int, verdicts: list[Verdict]) -> None:
        """Raises UnhealthyError if the run must end."""
        worst = next((v for v in verdicts if v.stops), None)
        if worst is not None:
            raise UnhealthyError(
                f"iteration {iteration} is stopped and does not count ({worst.reason}): {worst.message}"
            )
        if verdicts and self._stop:
            raise UnhealthyError(
                f"iteration {iteration} is unhealthy and failurePolicy.onUnhealthy is Stop ({verdicts[0].reason}): "
                f"{verdicts[0].message}"
            )

    def _trend(self, iteration: int) -> dict[str, Any]:
        """The rows of the first iteration and of the one before `iteration`, even if `iteration` is already noted."""
        trend = self._store.get("health/trend") or {"first": {}, "previous": {}, "last": [0, {}]}
        noted, last = trend["last"]
        return {"first": trend["first"], "previous": last if noted < iteration else trend["previous"]}
