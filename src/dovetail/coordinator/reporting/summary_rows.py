"""Makes the rows of a run's results, which compare before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

STAGES = ("sft", "reward", "dpo", "ppo")
PHASES = ("generation", "inference", "waiting", "training", "weights", "checkpoint", "other")


def get(document: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path: get(d, 'ppo.reward_last.mean'). None if it is missing."""
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def method(summary: Mapping[str, Any]) -> str:
    """The common name of the method in the stage ppo."""
    return str(get(summary, "method") or "PPO")


def interval(value: Any, digits: int = 3) -> str | None:
    """The text '1.234 ± 0.056' for {mean, ci95}. None if the value has another form."""
    if not isinstance(value, Mapping) or not isinstance(value.get("mean"), int | float):
        return None
    spread = value.get("ci95")
    text = f"{round(value['mean'], digits) + 0.0:.{digits}f}"  # adding 0 turns -0.000 into 0.000
    return f"{text} ± {spread:.{digits}f}" if isinstance(spread, int | float) else text


def binomial_p(correct: int, pairs: int) -> float:
    """The probability that coin flips get at least `correct` of `pairs` right. It is a one-sided binomial test against
    1/2."""
    if correct <= 0:
        return 1.0
    log_half = math.lgamma(pairs + 1) - pairs * math.log(2.0)
    terms = (math.exp(log_half - math.lgamma(k + 1) - math.lgamma(pairs - k + 1)) for k in range(correct, pairs + 1))
    return min(1.0, math.fsum(terms))


def _moved(what: str, before: Any, after: Any) -> str | None:
    """The verb phrase 'raised WHAT from 0.64 to 0.90'. Both values are numbers, or {mean, ci95}. It says so if the
    difference is within the error. None if a value is missing or not finite."""
    means, widths = [], []
    for value in (before, after):
        value = value if isinstance(value, Mapping) else {"mean": value}
        if not isinstance(value.get("mean"), int | float) or not math.isfinite(value["mean"]):
            return None
        means.append(float(value["mean"]))
        widths.append(float(value.get("ci95") or 0.0))
    # As many digits as show the difference.
    digits = next((n for n in range(2, 9) if f"{means[0]:.{n}f}" != f"{means[1]:.{n}f}"), 2)
    first, last = (f"{mean:.{digits}f}" for mean in means)
    if abs(means[1] - means[0]) <= math.hypot(*widths):
        return f"did not clearly change {what} ({first} before, {last} after)"
    return f"{'raised' if means[1] > means[0] else 'lowered'} {what} from {first} to {last}"


def outcome(summary: Mapping[str, Any]) -> str:
    """A sentence on what the run changed, such as 'PPO raised held-out quality from 0.64 to 0.90.' Held-out figures
    come first. Empty if there is nothing to compare."""
    ppo, dpo = method(summary), str(get(summary, "dpo.method") or "DPO")
    # The reward comes last. It is what was trained on, so other measures say more.
    measures = sorted((get(summary, "evaluation") or {}).items(), key=lambda item: item[0] == "reward")
    found = [_moved(f"held-out {name}", get(v, "before_ppo"), get(v, "after_ppo")) for name, v in measures]
    if phrases := [phrase for phrase in found if phrase]:
        return f"{ppo} {' and '.join(phrases)}."
    first, last = get(summary, "ppo.reward_first"), get(summary, "ppo.reward_last")
    if first != last and (said := _moved("the reward per sample", first, last)):  # one iteration is both
        held = "" if measures else " That is on the prompts of training: no held-out prompts were evaluated."
        return f"{ppo} {said}.{held}"
    for name, label in (("dpo", dpo), ("sft", "SFT")):
        if said := _moved("the held-out loss", get(summary, f"{name}.loss_before"), get(summary, f"{name}.loss_after")):
            return f"{label} {said}."
    accuracy = get(summary, "reward_model.accuracy")
    if accuracy is None:
        return ""
    return f"The reward model prefers the chosen response in {accuracy:.1%} of the held-out pairs."


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The rows (name, before or first, after or last) of all results in the summary."""
    found: list[tuple[str, str, str]] = []
    before, after = get(summary, "sft.loss_before"), get(summary, "sft.loss_after")
    if after is not None:
        found.append(("SFT loss, held out", f"{before:.3f}" if before is not None else "", f"{after:.3f}"))
    dpo = get(summary, "dpo.method") or "DPO"
    before, after = get(summary, "dpo.loss_before"), get(summary, "dpo.loss_after")
    if after is not None:
        found.append((f"{dpo} loss, held out", f"{before:.3f}" if before is not None else "", f"{after:.3f}"))
    for key, label in (("reward_model", "Reward model"), ("dpo", dpo)):
        accuracy, pairs = get(summary, f"{key}.accuracy"), get(summary, f"{key}.pairs")
        if accuracy is not None:
            text = f"{accuracy:.1%}"
            if pairs:
                p = binomial_p(round(accuracy * pairs), int(pairs))
                text += f" of {int(pairs)} pairs ({'p < 0.001' if p < 0.001 else f'p = {p:.3f}'})"
            elif responses := get(summary, f"{key}.responses"):
                text += f" of {int(responses)} responses"
            found.append((f"{label} accuracy, held out", "", text))
    for key, label in (("reward", "Reward per sample"), ("kl", "KL to reference, nats per sample")):
        first, last = interval(get(summary, f"ppo.{key}_first")), interval(get(summary, f"ppo.{key}_last"))
        if first or last:
            found.append((label, first or "", last or ""))
    return found + evaluation_rows(summary)


def evaluation_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The rows (measure, before, after) of the answers to held-out prompts. They compare before and after PPO, and
    before and after SFT if the model before SFT answered too. Empty if none were measured."""
    found = []
    for name, value in (get(summary, "evaluation") or {}).items():
        start, before, after = (interval(get(value, when)) for when in ("before_sft", "before_ppo", "after_ppo"))
        label = f"{name[0].upper()}{name[1:]} of {get(summary, 'evaluation.prompts')} held-out answers"
        if start:
            found.append((f"{label}, by SFT", start, before or ""))
        if before or after:
            found.append((f"{label}, by {method(summary)}" if start else label, before or "", after or ""))
    best = get(summary, "evaluation.best")
    if best is not None:
        found.append(
            (f"Highest {best['metric']} of an evaluation", f"iteration {best['iteration']}", interval(best) or "")
        )
    stopped = get(summary, "evaluation.stopped")
    if stopped is not None:
        found.append((f"{method(summary)} was ended by stopAfterNoGain", "", f"iteration {stopped['iteration']}"))
    return found


def duration(seconds: float) -> str:
    """A duration as text, such as '12.3 s', '4 min 07 s' or '2 h 05 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def fusion_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows (what, "", value) of inter-stage fusion. Empty if it was off."""
    fusion = get(summary, "fusion")
    if not isinstance(fusion, Mapping) or fusion.get("setting") == "Off":
        return []
    threshold, migrated = fusion.get("threshold"), fusion.get("migrated")
    how = "" if migrated is None else f", {migrated:.0f} of them migrated" if migrated else ", none had to migrate"
    found = [
        ("Fusion: samples migrated, all iterations", "", f"{fusion.get('samples_migrated', 0):.0f}"),
        (
            "Fusion: in the last iteration scoring began early",
            "",
            f"when {threshold} samples were left{how}" if threshold else "not, as that was not faster",
        ),
    ]
    saved, predicted = fusion.get("seconds_saved"), fusion.get("predicted_seconds_saved")
    if isinstance(saved, int | float):
        text = duration(saved) + (f" ({duration(predicted)} predicted)" if isinstance(predicted, int | float) else "")
        found.append(("Fusion: time saved", "", text))
    return found


def overlap_sentence(summary: Mapping[str, Any]) -> str:
    """A sentence on what a run gained from a lag. Empty for a run without one."""
    count, seconds, other = (
        get(summary, f"overlap.{name}") for name in ("iterations", "seconds", "synchronous_seconds")
    )
    if not count or seconds is None or other is None:
        return ""
    return (
        f"Phases overlap: an iteration took {duration(seconds / count)}; one after the other, its "
        f"phases take {duration(other / count)}."
    )


def stage_seconds(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Rows (stage, seconds) in the order in which stages run."""
    found = {k: float(v) for k, v in (get(summary, "stages") or {}).items() if isinstance(v, int | float)}
    return sorted(found.items(), key=lambda item: STAGES.index(item[0]) if item[0] in STAGES else len(STAGES))
