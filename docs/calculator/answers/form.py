"""Answers the form of docs/calculator.md: the best placement
of a job on some GPUs, the manifest with that placement, and what `dovetail plan` says of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from answers.peers import settings
from dovetail.gpus.inventory import InventoryError, read
from dovetail.manifest.documents import ManifestError, parse
from dovetail.manifest.resolve import resolve
from dovetail.manifest.types import API_VERSION, KIND
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.placements import Unknown, fragment, recommend
from dovetail.planner.planned_job import ConfigError, Infeasible

MODELS = ("actor", "critic", "reward", "reference")


def manifest(form: Mapping[str, Any]) -> dict[str, Any]:
    """The job of a form, on one GPU.

    `form`: `model`, a hub's name, or "" for a folder. `method`, grpo or ppo. `prompts` of an optimizer step, and
    `samples` of a prompt. `steps` of an iteration. `promptTokens` and `responseTokens`. `pools`, those of an
    inventory."""
    source = {"huggingFace": form["model"]} if form["model"] else {"path": "model"}
    grpo = form["method"] == "grpo"
    mini = form["prompts"] * form["samples"]
    more = {"samplesPerPrompt": form["samples"]} if grpo else {}
    product = form["pools"][0]["product"] if form["pools"] else ""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "calculated"},
        "spec": {
            "stages": ["ppo"],
            "models": {
                "actor": {"source": source},
                "reward": {"function": "rewards:score"} if grpo else {"source": source},
            },
            "data": {"prompts": [{"path": "prompts.jsonl"}], "maxPromptTokens": form["promptTokens"]},
            "ppo": {
                "advantage": "grpo" if grpo else "gae",
                **more,
                "globalBatchSize": mini * form["steps"],
                "miniBatchSize": mini,
                "microBatchSize": 1,
            },
            "generation": {"maxTokens": form["responseTokens"]},
            "groups": [{"name": "all", "roles": ["trainer", "rollout"], "gpu": {"product": product, "perPod": 1}}],
        },
    }


def answer(form: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows: `manifest`, `plan` (of the manifest's groups), `best` (the prediction on the pools, with
    prices and what was decided against) and `peers` (settings by trainer). Or `error`, one sentence.

    `form`: as for `manifest`, and `config`, the model's config.json."""
    try:
        inventory = read({"pools": form["pools"]})
        job = manifest(form)
        configs = dict.fromkeys(MODELS, form["config"])
        spec = resolve(parse(job).spec)
        chosen = recommend(spec, configs, inventory)
        found = fragment(chosen)
        job["spec"] |= {**found, "ppo": job["spec"]["ppo"] | found["ppo"]}
        plan = make_plan(resolve(parse(job).spec), None, configs)
    except (ManifestError, InventoryError, PlanError, Infeasible, ConfigError, Unknown) as error:
        return {"error": f"{str(error).rstrip('.')}."}
    return {
        "manifest": job,
        "plan": plan.model_dump(mode="json", by_alias=True),
        "best": chosen.prediction.model_dump(mode="json", by_alias=True),
        "peers": settings(spec, chosen.candidate, form["model"] or "model", inventory),
    }
