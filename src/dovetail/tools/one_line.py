"""Makes the manifest for `dovetail run --method ...` from a method, a model, data and reward functions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dovetail.manifest.fixed_names import DATA_KINDS, DataKind
from dovetail.manifest.types import API_VERSION, KIND
from dovetail.protocol.errors import UsageError

NAME_LENGTH = 40
# `spec.ppo` of each method, as in the table of docs/algorithms.md. DAPO's penalty depends on the lengths, and so is
# added later.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "sft": {},
    "dpo": {},
    "ppo": {},
    "grpo": {"advantage": "grpo", "samplesPerPrompt": 8, "lossAggregation": "Sequence"},
    "dr-grpo": {
        "advantage": "grpo",
        "samplesPerPrompt": 8,
        "normalizeStd": False,
        "lossAggregation": "Constant",
        "kl": {"coef": 0.0},
    },
    "dapo": {
        "advantage": "grpo",
        "samplesPerPrompt": 16,
        "clipHigh": 0.28,
        "dynamicSampling": 8,
        "dropEqualGroups": True,
        "kl": {"coef": 0.0},
    },
    "gspo": {
        "advantage": "grpo",
        "samplesPerPrompt": 8,
        "loss": "gspo",
        "lossAggregation": "Sequence",
        "clipLow": 0.0003,
        "clipHigh": 0.0004,
    },
    "cispo": {"advantage": "grpo", "samplesPerPrompt": 8, "loss": "cispo", "clipHigh": 0.28},
    "rloo": {"advantage": "rloo", "samplesPerPrompt": 4},
    "reinforce++": {"advantage": "reinforce++"},
}
# The maximum tokens of a prompt, if the data does not say more, and of a response on CPUs.
PROMPT_TOKENS = RESPONSE_TOKENS = 512
# Responses of reasoning models are longer. A model whose context is not known yet has at least 2,048 tokens.
REASONING_TOKENS = 4096
SURE_CONTEXT = 2048
# The most tokens of a micro-batch on a GPU with 80 GB. A smaller GPU gets fewer.
MICRO_BATCH_TOKENS = 32_768


@dataclass(frozen=True)
class GPUs:
    """The GPUs of this machine. `product`: the value of the node label nvidia.com/gpu.product. `memory`: bytes of
    each."""

    product: str
    count: int
    memory: int


@dataclass(frozen=True)
class OneLine:
    """The options of the command line. Data and models are files, folders or names on a hub, as the user wrote them.
    `rewards`: module:function or file.py:function."""

    method: str
    model: str
    demonstrations: Sequence[str] = ()
    preferences: Sequence[str] = ()
    prompts: Sequence[str] = ()
    rewards: Sequence[str] = ()


def product_label(name: str) -> str:
    """The node label's value for a GPU's name. NVIDIA's feature discovery writes dashes for spaces."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")[:63]


def document(
    line: OneLine,
    local: frozenset[str],
    gpus: GPUs | None,
    context: int | None = None,
    longest: Mapping[DataKind, int] | None = None,
) -> dict[str, Any]:
    """The manifest as plain data for `yaml.safe_dump`. `local`: the names in `line` that are files or folders here.
    Others are names of a hub. `gpus`: None means CPUs. `context`: the longest sequence of the model in tokens, if it is
    known. `longest`: the tokens of the longest record of each data set that is known. Raises UsageError, which names
    the option."""
    stages, longest = _stages(line), longest or {}
    records = [most for kind, most in longest.items() if kind != "prompts"]
    generates = "ppo" in stages
    known = longest.get("prompts") if generates else max(records, default=None)
    prompt, response = _lengths(known, context, gpus, generates)
    models: dict[str, Any] = {"actor": {"source": _source(line.model, local)}}
    if line.rewards:
        models["reward"] = _reward(line.rewards)
    data: dict[str, Any] = {}
    for name in DATA_KINDS:
        if given := getattr(line, name):
            data[name] = [_source(each, local) for each in given]
    most = min(max([prompt + RESPONSE_TOKENS, *map(_round_up, records)]), context or SURE_CONTEXT)
    data |= {"maxPromptTokens": prompt, "maxTokens": most}
    spec: dict[str, Any] = {"stages": stages, "models": models, "data": data}
    ranks = gpus.count if gpus is not None else 1
    micro, together = 4, {}
    if gpus is not None:
        fit = MICRO_BATCH_TOKENS * gpus.memory // (80 * 10**9)
        micro = max(1, min(8, fit // (prompt + response if generates else most)))
        together = {"microBatchTokens": "Auto"}
    for stage, rate in (("sft", 1e-5), ("reward", 1e-5), ("dpo", 1e-6)):
        if stage in stages:
            size = _multiple(32 if gpus is not None else 8, ranks * micro)
            spec[stage] = {"batchSize": size, "microBatchSize": micro, **together, "optimizer": {"learningRate": rate}}
    if generates:
        spec["ppo"] = _ppo(line, ranks, micro, gpus is not None, response) | together
        spec["generation"] = {"maxTokens": response}
    spec["groups"] = _groups(generates, gpus)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": job_name(line)}, "spec": spec}


def _lengths(longest: int | None, context: int | None, gpus: GPUs | None, generates: bool) -> tuple[int, int]:
    """The maximum tokens of a prompt and of a response."""
    limit = context or SURE_CONTEXT
    prompt = min(PROMPT_TOKENS if longest is None else _round_up(longest), limit // 2)
    response = REASONING_TOKENS if generates and gpus is not None else RESPONSE_TOKENS
    return prompt, min(response, limit - prompt)


def _round_up(tokens: int) -> int:
    return _multiple(max(tokens, 1), 64)


def job_name(line: OneLine) -> str:
    """The method and the last part of the model's name, in the form that Kubernetes accepts, as grpo-qwen2-5-0-5b."""
    model = PurePath(line.model).name
    return kubernetes_name(f"{line.method} {model}")


def kubernetes_name(text: str) -> str:
    """The text in the form that Kubernetes accepts for names. Other characters become dashes, and it is cut to
    NAME_LENGTH characters. It may begin with a digit."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:NAME_LENGTH].strip("-")


def _stages(line: OneLine) -> list[str]:
    unread = {"sft": ("preferences", "prompts", "rewards"), "dpo": ("prompts", "rewards")}.get(line.method, ())
    for name in unread:
        if getattr(line, name):
            raise UsageError(f"--method {line.method} does not read --{'reward' if name == 'rewards' else name}")
    if line.method == "sft":
        if not line.demonstrations:
            raise UsageError("--method sft needs --demonstrations FILE: records with a prompt and a response")
        return ["sft"]
    if line.method == "dpo":
        if not line.preferences:
            raise UsageError("--method dpo needs --preferences FILE: records with prompt, chosen and rejected")
        return ["sft"] * bool(line.demonstrations) + ["dpo"]
    if not line.prompts:
        raise UsageError(f"--method {line.method} needs --prompts FILE: records with a prompt")
    if not line.rewards and not line.preferences:
        raise UsageError(
            f"--method {line.method} needs --reward module:function, or --preferences FILE to train a reward model from"
        )
    if line.rewards and line.preferences:
        raise UsageError("--reward replaces the reward model that --preferences trains; give one of them")
    return ["sft"] * bool(line.demonstrations) + ["reward"] * bool(line.preferences) + ["ppo"]


def _source(name: str, local: frozenset[str]) -> dict[str, str]:
    return {"path": name} if name in local else {"huggingFace": name}


def _reward(rewards: Sequence[str]) -> dict[str, Any]:
    functions, folders = [], set()
    for text in rewards:
        module, _, function = text.rpartition(":")
        if not module or not function:
            raise UsageError(f"--reward {text}: write it as module:function, for example rewards:correct")
        if module.endswith(".py"):
            path = PurePath(module)
            folders.add(str(path.parent))
            module = path.stem
        else:
            folders.add(".")
        functions.append(f"{module}:{function}")
    if len(folders) > 1:
        raise UsageError("--reward: the functions are in several folders; put them into one")
    (folder,) = folders
    found: dict[str, Any] = (
        {"function": functions[0]} if len(functions) == 1 else {"functions": [{"function": f} for f in functions]}
    )
    return found if folder == "." else found | {"importPath": folder}


def _ppo(line: OneLine, ranks: int, micro: int, on_gpus: bool, response: int) -> dict[str, Any]:
    ppo = dict(METHODS[line.method])
    if "samplesPerPrompt" in ppo and not on_gpus:
        ppo["samplesPerPrompt"] = 4
    if line.method == "dapo":
        ppo["overlong"] = {"fromTokens": response * 3 // 4}
    size = _multiple(64 if on_gpus else 16, math.lcm(ranks * micro, ppo.get("samplesPerPrompt", 1)))
    ppo |= {"iterations": 100, "lag": "Auto", "globalBatchSize": size, "miniBatchSize": size, "microBatchSize": micro}
    ppo["actorOptimizer"] = {"learningRate": 1e-6}
    if line.method == "ppo":
        ppo["criticOptimizer"] = {"learningRate": 1e-5}
    return ppo


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def _groups(generates: bool, gpus: GPUs | None) -> list[dict[str, Any]]:
    if gpus is not None:
        # Trainers and servers take turns on each GPU, so that one GPU is enough.
        roles = ["trainer", "rollout"] if generates else ["trainer"]
        gpu = {"product": gpus.product, "perPod": 1}
        return [{"name": "gpus", "roles": roles, "replicas": gpus.count, "gpu": gpu}]
    groups = [{"name": "trainers", "roles": ["trainer"], "replicas": 1}]
    return groups + ([{"name": "rollouts", "roles": ["rollout"], "replicas": 1}] if generates else [])
