"""Makes the files that `dovetail init` writes: a commented manifest, five records of each data set, and a reward
function. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Literal

Method = Literal["sft", "ppo", "grpo", "dpo"]

_WHAT = {
    "sft": "Supervised fine-tuning: the model learns to answer as the demonstrations do.",
    "ppo": "RLHF in three stages: SFT on demonstrations, a reward model on preferences, and PPO on prompts.",
    "grpo": "GRPO: the model answers each prompt several times, and a Python function scores the answers.",
    "dpo": "SFT on demonstrations, and DPO: the model learns from preferences, without a reward model.",
}
_KTO = "KTO: the model learns from single answers that are labelled good or bad, without a reward model."
_SUMS = [(2, 3), (4, 4), (7, 2), (5, 6), (9, 1)]
_ASKED = ["Name a colour.", "Name a fruit.", "Name a river.", "Name a metal.", "Name a planet."]
_ANSWERS = ["Red is a colour.", "An apple is a fruit.", "The Nile is a river.", "Iron is a metal.", "Mars is a planet."]

_HEAD = '''"""Rewards for GRPO.

A function gets a list of prompts, a list of responses, and one list for each other field of the prompts' records{have}.
It returns one number for each response."""
'''
_CORRECT = '''

def correct(prompts: list[str], responses: list[str], {field}: list, **fields: list) -> list[float]:
    """1 if the response contains the right answer."""
    return [1.0 if str(right) in response else 0.0 for response, right in zip(responses, {field})]
'''
_WORDS = '''

def words(prompts: list[str], responses: list[str], **fields: list) -> list[float]:
    """The share of different words in the response. Write here what a good answer is."""
    return [len(set(text.split())) / max(len(text.split()), 1) for text in responses]
'''
_SHORT = '''

def short(prompts: list[str], responses: list[str], **fields: list) -> list[float]:
    """Between 0 for a long response and 1 for an empty one."""
    return [1.0 / (1.0 + len(response) / 100.0) for response in responses]
'''
# Usual names of the field that holds the right answer.
ANSWER_FIELDS = ("answer", "solution", "ground_truth", "target", "reference", "label", "gold", "output", "response")


def answer_field(fields: Sequence[str]) -> str | None:
    """The field with the right answer, if a field of the records has such a name."""
    return next((name for name in ANSWER_FIELDS if name in fields), None)


def rewards(fields: Sequence[str]) -> str:
    """The content of rewards.py for prompts whose records have these other fields."""
    right = answer_field(fields)
    have = f" (here:\n{', '.join(fields)})" if fields else ""
    head = _HEAD.format(have=have)
    return head + (_WORDS if right is None else _CORRECT.format(field=right)) + _SHORT


def _jsonl(records: Sequence[object]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _demonstrations() -> str:
    return _jsonl([{"prompt": p, "response": r} for p, r in zip(_ASKED, _ANSWERS, strict=True)])


def _preferences() -> str:
    pairs = zip(_ASKED, _ANSWERS, strict=True)
    return _jsonl([{"prompt": p, "chosen": r, "rejected": "I will not say."} for p, r in pairs])


def starter(
    method: Method,
    name: str,
    model: str | None = None,
    model_is_folder: bool = False,
    data: str | None = None,
    context: int | None = None,
    fields: Sequence[str] = ("answer",),
    labelled: bool = False,
) -> dict[str, str]:
    """The files by name. `model`: a folder or a hub's repository. Without it the model is tiny and has random weights.
    `data`: the user's own records, in place of five examples. `context`: the longest sequence of the model in tokens,
    if it is known. `fields`: the fields of the records without the prompt. `labelled`: the user's records for DPO are
    responses with labels, which KTO learns from."""
    scratch = model is None
    source, limits = _source(model, model_is_folder), _lengths(scratch, context)
    manifest = _manifest(method, name, source, scratch, data, limits, fields, labelled)
    files = {"job.yaml": manifest}
    if data is not None:
        return files | ({"rewards.py": rewards(fields)} if method == "grpo" else {})
    if method == "grpo":
        sums = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in _SUMS]
        return files | {"prompts.jsonl": _jsonl(sums), "rewards.py": rewards(fields)}
    files["demonstrations.jsonl"] = _demonstrations()
    if method in ("ppo", "dpo"):
        files["preferences.jsonl"] = _preferences()
    if method == "ppo":
        files["prompts.jsonl"] = _jsonl([{"prompt": p} for p in _ASKED])
    return files


def _lengths(scratch: bool, context: int | None) -> tuple[int, int]:
    """The maximum tokens of a prompt and of a response."""
    prompt, response = (64, 32) if scratch else (512, 512)
    if context is None or prompt + response <= context:
        return prompt, response
    return context // 2, context - context // 2


def _source(model: str | None, folder: bool) -> str:
    if model is not None:
        return f"source: {{{'path' if folder else 'huggingFace'}: {json.dumps(model)}}}"
    return (
        "# A tiny model from random weights shows that everything works. It learns nothing of use. Take a real one:\n"
        "# source: {huggingFace: Qwen/Qwen2.5-0.5B}   or   source: {path: /models/mine}\n"
        "source:\n"
        "  scratch:\n"
        "    architecture: llama\n"
        "    config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2,\n"
        "      num_key_value_heads: 2, max_position_embeddings: 512}"
    )


def _data(method: Method, data: str | None, labelled: bool) -> str:
    def source(name: str) -> str:
        return f"[{{path: {json.dumps(data or name)}}}]"

    if labelled and method == "dpo":
        return f"preferences: {source('')}  # prompt, response and label"
    lines = []
    if method != "grpo":
        lines.append(f"demonstrations: {source('demonstrations.jsonl')}  # prompt and response")
    if method in ("ppo", "dpo"):
        lines.append(f"preferences: {source('preferences.jsonl')}  # prompt, chosen and rejected")
    if method in ("ppo", "grpo"):
        fields = "prompt; the reward function gets all other fields" if method == "grpo" else "prompt"
        lines.append(f"prompts: {source('prompts.jsonl')}  # {fields}")
    if data is not None and method in ("ppo", "dpo"):
        lines.append("# The stages share the file. No record is used by two of them.")
        lines.append("split: {sft: 2, reward: 4, ppo: 4}" if method == "ppo" else "split: {sft: 2, reward: 8}")
    return "\n".join(lines)


_REWARD = """\
reward:
  # The score is the weighted sum. dovetail samples shows what each function gave to each response.
  functions:
  - {{function: "rewards:{function}", needs: Sample}}
  - {{function: "rewards:short", needs: Sample, weight: 0.1}}"""

_SUPERVISED = """\
{stage}:
  steps: {steps}
  batchSize: 8
  microBatchSize: 4  # lower it if memory does not suffice
  optimizer: {{learningRate: {rate}}}"""


def _ppo(method: Method, scratch: bool) -> str:
    rate = "1.0e-3" if scratch else "1.0e-6"
    if method == "grpo":
        return (
            "ppo:\n  # Prompts in an iteration: globalBatchSize / samplesPerPrompt.\n  advantage: grpo\n"
            f"  samplesPerPrompt: 4\n  iterations: {5 if scratch else 100}\n"
            "  globalBatchSize: 16\n  miniBatchSize: 16\n  microBatchSize: 4\n  kl: {coef: 0.01}\n"
            f"  actorOptimizer: {{learningRate: {rate}}}"
        )
    return (
        f"ppo:\n  iterations: {5 if scratch else 100}\n  globalBatchSize: 16\n  miniBatchSize: 16\n"
        "  microBatchSize: 4\n  # Higher keeps the model nearer to what it was after SFT.\n  kl: {coef: 0.05}\n"
        f"  actorOptimizer: {{learningRate: {rate}}}\n  criticOptimizer: {{learningRate: {rate}}}"
    )


def _manifest(
    method: Method,
    name: str,
    source: str,
    scratch: bool,
    data: str | None,
    limits: tuple[int, int],
    fields: Sequence[str],
    labelled: bool,
) -> str:
    prompt, response = limits

    def at(indent: int, text: str) -> str:
        return textwrap.indent(text, " " * indent)

    models = [f"    actor:\n{at(6, source)}"]
    if method == "grpo":
        models.append(at(4, _REWARD.format(function="words" if answer_field(fields) is None else "correct")))
    if scratch:
        models.append("    tokenizer: {train: {vocabSize: 300}}")
    stages = {"sft": ["sft"], "ppo": ["sft", "reward", "ppo"], "grpo": ["ppo"], "dpo": ["sft", "dpo"]}[method]
    kto = labelled and method == "dpo"
    if kto:
        stages = ["dpo"]
    steps = 20 if scratch else 200
    rates = dict.fromkeys(stages, "1.0e-3" if scratch else "1.0e-5") | {"dpo": "5.0e-4" if scratch else "1.0e-6"}
    parts = [_SUPERVISED.format(stage=each, steps=steps, rate=rates[each]) for each in stages if each != "ppo"]
    if kto:
        parts[0] += "\n  loss: KTO"
    if "ppo" in stages:
        parts.append(_ppo(method, scratch))
        thought = "" if scratch else "  # a model that reasons needs 4096 or more"
        parts.append(f"generation:\n  maxTokens: {response}{thought}\n  temperature: 1.0")
    roles = "{name: trainers, roles: [trainer], replicas: 1}"
    groups = f"groups:\n# GPUs: gpu: {{product: NVIDIA-A100-SXM4-80GB, perPod: 1}} in a group\n- {roles}"
    if "ppo" in stages:
        groups += "\n- {name: rollouts, roles: [rollout], replicas: 1}"
    parts.append(groups)
    shows = f"dovetail samples runs/{name}" if "ppo" in stages else f"dovetail chat runs/{name}"
    if stages == ["sft"]:
        shows += " --model sft"
    commands = [
        ("dovetail validate job.yaml", "checks this file"),
        ("dovetail run job.yaml", "runs it on this machine"),
        (shows, "shows what the model says"),
        (f"dovetail explain RLHFJob.spec.{stages[-1]}", "describes a field, and the fields below it"),
    ]
    width = max(len(command) for command, _ in commands)
    lengths = f"maxPromptTokens: {prompt}\nmaxTokens: {128 if scratch else prompt + response}"
    return (
        f"# {_KTO if kto else _WHAT[method]}\n"
        + "".join(f"#   {command:<{width}}  {what}\n" for command, what in commands)
        + "apiVersion: dovetail.dev/v1alpha1\n"
        "kind: RLHFJob\n"
        f"metadata: {{name: {name}}}\n"
        "spec:\n"
        f"  stages: [{', '.join(stages)}]\n"
        "  models:\n"
        + "\n".join(models)
        + "\n  data:\n"
        + at(4, _data(method, data, labelled))
        + "\n"
        + at(4, lengths)
        + "\n"
        "    # This share of the records is never trained on. Losses of the report are measured on it.\n"
        f"    heldOut: {0.2 if data is None else 0.05}\n" + "\n".join(at(2, part) for part in parts) + "\n"
    )
