"""Translates the coordinator's GET /v1/status into fields of the job's status."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dovetail.kube import names
from dovetail.manifest.status import ArtifactStatus, EvaluationStatus, RLHFJobStatus
from dovetail.manifest.types import TRAINED_MODELS, Stage
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.children import Children, Object, label
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.volume_claim import claim_name
from dovetail.protocol.process.process_names import COORDINATOR

# Kubernetes stores counts in a status as 64-bit integers. Real counts are far below this limit.
_MOST = 2**53
_PROBLEM_CHARACTERS = 1000
_PARTS: dict[str, tuple[str, ...]] = {
    "metrics": ("reward", "kl", "samples_per_second", "iteration_seconds"),
    "plan": ("expected_iteration_seconds", "problem"),
    "checkpoint": ("stage", "step", "path"),
}
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,99}")
_DOWNLOADING = "downloading "  # the coordinator's `Hub` writes this
_VERDICTS = 16
_MODELS = ("actor", "critic", "reward", "reference", "tokenizer")
_COUNTS = ("step", "total_steps", "iteration", "total_iterations", "weight_version")


def judged(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a coordinator's status that the operator uses, copied so that the rest need not be kept. Raises
    ValueError for an answer that no coordinator of Dovetail gives."""
    if document.get("stage") not in {None, *(stage.value for stage in Stage)}:
        raise ValueError("there is no such stage")
    found = {key: document[key] for key in ("stage", *_COUNTS) if key in document}
    for key in _COUNTS:
        value = found.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < _MOST):
            raise ValueError(f"{key} is no count")
    for key, parts in _PARTS.items():
        part = document.get(key)
        if part is not None:
            if not isinstance(part, dict):
                raise ValueError(f"{key} is no object")
            found[key] = {name: part[name] for name in parts if name in part}
    for value in (*found.get("metrics", {}).values(), found.get("plan", {}).get("expected_iteration_seconds")):
        if value is not None and not isinstance(value, int | float):
            raise ValueError("a figure is no number")
    if isinstance(problem := found.get("plan", {}).get("problem"), str):
        found["plan"]["problem"] = problem[:_PROBLEM_CHARACTERS]
    if document.get("models"):
        found["models"] = _judged_models(document["models"])
    if isinstance(trained := document.get("artifacts"), list):
        found["artifacts"] = [name for name in TRAINED_MODELS if name in trained]  # other names are ignored
    if (doing := document.get("message")) and isinstance(doing, str) and doing.startswith(_DOWNLOADING):
        found["message"] = doing[:_PROBLEM_CHARACTERS]
    if document.get("evaluation"):
        found["evaluation"] = _judged_evaluation(document["evaluation"])
    if document.get("health"):
        found["health"] = _judged_health(document["health"])
    try:
        RLHFJobStatus.model_validate(fields(found))
    except (ValidationError, OverflowError) as error:
        raise ValueError("it makes no status") from error
    return found


def _judged_models(told: object) -> dict[str, dict[str, str]]:
    kept = {}
    for name, model in (told if isinstance(told, dict) else {}).items():
        repository, commit = (model.get("repository"), model.get("commit")) if isinstance(model, dict) else (None, None)
        if name not in _MODELS or not isinstance(repository, str) or not isinstance(commit, str):
            raise ValueError("models are no repositories and commits")
        kept[name] = {"repository": repository, "commit": commit}
    return kept


def _judged_evaluation(told: object) -> dict[str, Any]:
    """`EvaluationStatus`, with six digits of each figure."""
    try:
        assert isinstance(told, dict)
        metric = str(told["metric"])
        kept = {"iteration": told["iteration"], "metric": metric, "value": _short(told["metrics"][metric]["mean"])}
        if best := told.get("best"):
            kept |= {"best_iteration": best["iteration"], "best_value": _short(best["mean"])}
        return EvaluationStatus.model_validate(kept).model_dump(mode="json")
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError("evaluation is no evaluation") from error


def _short(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError("a figure is not finite")
    return float(f"{value:.6g}")


def _judged_health(told: object) -> dict[str, Any]:
    verdicts = told.get("verdicts") if isinstance(told, dict) else None
    if not isinstance(told, dict) or type(told.get("iteration")) is not int or not isinstance(verdicts, list):
        raise ValueError("health is no verdict on an iteration")
    kept = []
    for verdict in verdicts[:_VERDICTS]:
        reason, message = (verdict.get("reason"), verdict.get("message")) if isinstance(verdict, dict) else (None, None)
        if not isinstance(reason, str) or not _REASON.fullmatch(reason) or not isinstance(message, str):
            raise ValueError("a verdict has no reason or no message")
        kept.append({"reason": reason, "message": message[:_PROBLEM_CHARACTERS]})
    return {"iteration": told["iteration"], "verdicts": kept}


def fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of RLHFJobStatus that the coordinator knows. Those that it does not know yet are left out."""
    found: dict[str, Any] = {}
    stage = document.get("stage")
    if not isinstance(stage, str):
        return found
    metrics = document.get("metrics") or {}
    counts = ("iteration", "total_iterations") if stage == Stage.PPO.value else ("step", "total_steps")
    found["stage"] = stage
    found["iteration"], found["iterations"] = (int(document.get(key) or 0) for key in counts)
    if stage == Stage.PPO.value:
        # Six digits are enough. More would change with every iteration and say nothing.
        for ours, theirs in (
            ("reward", "reward"),
            ("kl", "kl"),
            ("samples_per_second", "samples_per_second"),
            ("measured_iteration_seconds", "iteration_seconds"),
        ):
            value = metrics.get(theirs)
            if isinstance(value, int | float) and math.isfinite(value):
                found[ours] = float(f"{value:.6g}")
    expected = (document.get("plan") or {}).get("expected_iteration_seconds")
    if isinstance(expected, int | float) and math.isfinite(expected):
        found["predicted_iteration_seconds"] = float(f"{expected:.6g}")
    version = document.get("weight_version")
    if isinstance(version, int):
        found["weight_version"] = version
    if document.get("evaluation"):
        found["evaluation"] = document["evaluation"]
    checkpoint = document.get("checkpoint")
    if isinstance(checkpoint, dict) and checkpoint.get("path"):
        found["last_checkpoint"] = {key: checkpoint.get(key) for key in ("stage", "step", "path")}
    if models := document.get("models"):
        found["models"] = [{"name": name, **models[name]} for name in sorted(models)]
    return found


def artifacts(context: RenderContext, document: Mapping[str, Any]) -> list[ArtifactStatus]:
    """The places of the models that the coordinator has named. `document` has passed `judged`."""
    folder, output = names.folder(context.job, context.uid), context.job.spec.output
    place = output.place.rstrip("/") if output is not None else ""
    return [
        ArtifactStatus(
            name=name,
            claim=claim_name(context),
            path=f"{folder}/models/{name}",
            copy=f"{place}/{name}" if place else None,
        )
        for name in document.get("artifacts", ())
    ]


def download(document: Mapping[str, Any]) -> str:
    """The progress of the coordinator's download. Empty if it downloads nothing. The document has passed `judged`."""
    return str(document.get("message") or "")


def plan_problem(document: Mapping[str, Any]) -> str | None:
    """One sentence if the measured iterations differ much from the plan's."""
    told = (document.get("plan") or {}).get("problem")
    return told if isinstance(told, str) and told else None


@dataclass(frozen=True)
class RunHealth:
    """The verdict of the coordinator on the last PPO iteration, with a `reason` for programs and a sentence for
    people."""

    healthy: bool
    reason: str
    message: str


def health(document: Mapping[str, Any]) -> RunHealth | None:
    """The verdict on the last iteration. None before the first iteration. The document has passed `judged`."""
    told = document.get("health")
    if not told:
        return None
    if not told["verdicts"]:
        return RunHealth(True, reasons.HEALTHY, "")
    sentences = "; ".join(verdict["message"] for verdict in told["verdicts"])
    return RunHealth(False, told["verdicts"][0]["reason"], f"iteration {told['iteration']}: {sentences}")


def coordinator_pod(children: Children) -> Object | None:
    """The newest pod of the coordinator."""
    pods = [p for p in children.pods(surplus=False) if label(p, names.ROLE_LABEL) == COORDINATOR]
    return max(pods, key=lambda p: str(p["metadata"].get("creationTimestamp", "")), default=None)


def last_status(children: Children) -> tuple[dict[str, Any], str]:
    """The last status of a coordinator that ended well, and the time of its end. The status is empty if there is
    none."""
    pod = coordinator_pod(children) or {}
    for container in pod.get("status", {}).get("containerStatuses") or []:
        ended = container.get("state", {}).get("terminated") or {}
        if ended.get("exitCode") == 0:
            try:
                document = json.loads(ended.get("message") or "")
                if not isinstance(document, dict):
                    return {}, ""
                document |= judged(document)
            except (ValueError, RecursionError):
                return {}, ""
            return document, str(ended.get("finishedAt") or "")
    return {}, ""


def last_health(children: Children) -> dict[str, Any]:
    """The status with the verdict that made the coordinator end its job. Empty if there was none."""
    pod = coordinator_pod(children) or {}
    for container in pod.get("status", {}).get("containerStatuses") or []:
        ended = container.get("state", {}).get("terminated") or {}
        first = str(ended.get("message") or "").partition("\n")[0]
        if ended.get("exitCode") != 0 and first.startswith("{"):
            try:
                return {"health": _judged_health(json.loads(first).get("health"))}
            except (ValueError, RecursionError):
                return {}
    return {}
