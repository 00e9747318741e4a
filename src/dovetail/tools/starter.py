"""Makes the files that `dovetail init` writes: the manifest that `dovetail run --method` means, with comments, five
records of each data set, and a reward function."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.merge import merge

Method = Literal["sft", "ppo", "grpo", "dpo"]

_WHAT = {
    "sft": "Supervised fine-tuning: the model learns to answer as the demonstrations do.",
    "ppo": "RLHF in three stages: SFT on demonstrations, a reward model on preferences, and PPO on prompts.",
    "grpo": "GRPO: the model answers each prompt several times, and a Python function scores the answers.",
    "agent": "GRPO with an agent: the model calls the tools of an environment, which says what an episode earned.",
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


GAME = '''"""The environment of this job: a class, whose public methods are the tools of the model.

An object lives as long as its episode. It runs in a sandbox: without network, and it may write to /tmp only."""

import re


class Game:
    """A number from 1 to 99 is to be guessed. There is a calculator, too."""

    def reset(self, secret: int) -> str:
        """Begin an episode with the fields of a record of prompts.jsonl. What it returns is told to the model."""
        self.secret, self.guesses = secret, []
        return "The number is between 1 and 99."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        if not 1 <= number <= 99:
            raise ValueError("the number is between 1 and 99")  # The model is told so, and the episode goes on.
        self.guesses.append(number)
        return "right" if number == self.secret else "higher" if number < self.secret else "lower"

    def calculate(self, expression: str) -> str:
        """Compute an expression, such as (50 + 75) // 2.

        Args:
            expression: Numbers, + - * / // and brackets.
        """
        if not re.fullmatch(r"[-+*/() 0-9.]{1,100}", expression) or "**" in expression:
            raise ValueError("an expression has numbers, + - * / // and brackets")
        try:
            return str(eval(expression, {"__builtins__": {}}))
        except (SyntaxError, TypeError, ArithmeticError) as error:
            raise ValueError(f"cannot compute {expression}: {error}") from error

    def get_reward(self) -> float:
        """What the episode earned."""
        return 1.0 / len(self.guesses) if self.secret in self.guesses else 0.0
'''
# Writes calls of tools as Qwen2.5's chat template does, but names only the tools.
_TOOLS_TEMPLATE = """\
{%- if tools %}{{ "<|im_start|>system\\nTools:" }}{% for tool in tools %}{{ " " + tool.function.name }}{% endfor %}
{{- "<|im_end|>\\n" }}{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- else %}{{ "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ "}\\n</tool_call>" }}{% endfor %}
{%- endif %}{{ "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
_MARKS = ("<|pad|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def save_tools_tokenizer(folder: Path) -> None:
    """Write a tokenizer that has bytes, and the marks of a chat template that knows tools."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*_MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=_MARKS[0], eos_token=_MARKS[1], chat_template=_TOOLS_TEMPLATE
    ).save_pretrained(folder)


# The data sets of each method.
READ: Mapping[Method, tuple[DataKind, ...]] = {
    "sft": ("demonstrations",),
    "ppo": ("demonstrations", "preferences", "prompts"),
    "grpo": ("prompts",),
    "dpo": ("demonstrations", "preferences"),
}


def examples(method: Method) -> dict[str, str]:
    """The files with five records of each data set, by name."""
    sums = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in _SUMS]
    records: dict[DataKind, Sequence[object]] = {
        "demonstrations": [{"prompt": p, "response": r} for p, r in zip(_ASKED, _ANSWERS, strict=True)],
        "preferences": [
            {"prompt": p, "chosen": r, "rejected": "I will not say."} for p, r in zip(_ASKED, _ANSWERS, strict=True)
        ],
        "prompts": sums if method == "grpo" else [{"prompt": p} for p in _ASKED],
    }
    return {f"{kind}.jsonl": _jsonl(records[kind]) for kind in READ[method]}


def agent_prompts() -> str:
    """The content of prompts.jsonl for the environment GAME."""
    return _jsonl([{"prompt": "I think of a number. Which one is it?", "secret": n} for n in (7, 24, 50, 63, 91)])


def agent_job(manifest: dict[str, Any], scratch: bool) -> dict[str, Any]:
    """The manifest of GRPO with episodes of GAME in place of samples."""
    spec = manifest["spec"]
    spec["sessions"] = {"environment": {"function": "game:Game"}, "maxTurns": 8}
    spec["generation"]["maxTokens"] = 512
    spec["data"] |= {"maxPromptTokens": 512, "heldOut": 0.2}
    if scratch:
        spec["models"]["actor"]["source"]["scratch"]["config"]["max_position_embeddings"] = 1024
        spec["models"]["tokenizer"] = {"path": "tokenizer"}
    return manifest


def _jsonl(records: Sequence[object]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


# The model that shows that everything works, and what makes it quick.
_TINY: dict[str, Any] = {
    "models": {
        "actor": {
            "source": {
                "$patch": "replace",
                "scratch": {
                    "architecture": "llama",
                    "config": {
                        "hidden_size": 64,
                        "intermediate_size": 128,
                        "num_hidden_layers": 2,
                        "num_attention_heads": 2,
                        "num_key_value_heads": 2,
                        "max_position_embeddings": 512,
                    },
                },
            }
        },
        "tokenizer": {"train": {"vocabSize": 300}},
    },
    "data": {"maxPromptTokens": 64, "maxTokens": 128},
    "sft": {"steps": 20, "optimizer": {"learningRate": 1e-3}},
    "reward": {"steps": 20, "optimizer": {"learningRate": 1e-3}},
    "dpo": {"steps": 20, "optimizer": {"learningRate": 5e-4}},
    "ppo": {
        "iterations": 5,
        "actorOptimizer": {"learningRate": 1e-3},
        "criticOptimizer": {"learningRate": 1e-3},
    },
    "generation": {"maxTokens": 32},
}
# What stands above a field.
_COMMENTS = {
    "models.reward": "The score is the weighted sum. dovetail samples shows what each function gave to each response.",
    "data.demonstrations": "Records with prompt and response.",
    "data.preferences": "Records with prompt, chosen and rejected.",
    "data.prompts": "Records with a prompt. A reward function gets all other fields.",
    "data.split": "The stages share the file. No record is used by two of them.",
    "data.heldOut": "This share of the records is never trained on. Losses of the report are measured on it.",
    "sft.microBatchSize": "Lower it if memory does not suffice.",
    "ppo.lag": "The plan says whether answers are drawn while the trainers learn. 0: they take turns.",
    "ppo.globalBatchSize": "Prompts in an iteration: globalBatchSize / samplesPerPrompt.",
    "generation": "A model that reasons needs 4096 or more.",
    "sessions": "Samples are episodes: the model calls the tools of game.py, which runs in a sandbox (bubblewrap).",
    "groups": "With GPUs a group has: gpu: {product: NVIDIA-A100-SXM4-80GB, perPod: 1}",
}
_SCRATCH = (
    "A tiny model from random weights shows that everything works. It learns nothing of use. Take a real one:\n"
    "source: {huggingFace: Qwen/Qwen2.5-0.5B}   or   source: {path: /models/mine}"
)


def first_job(manifest: dict[str, Any], method: Method, *, scratch: bool, own: bool, labelled: bool) -> dict[str, Any]:
    """The manifest of `dovetail run --method` as one begins with it. `scratch`: take a tiny model. `own`: all data sets
    are one file of the user. `labelled`: its records are responses with labels, which KTO learns from."""
    spec = manifest["spec"]
    if scratch:
        spec |= merge(spec, {name: value for name, value in _TINY.items() if name in spec})
        if method != "ppo":
            spec.get("ppo", {}).pop("criticOptimizer", None)
    spec["data"]["heldOut"] = 0.1 if own else 0.2
    if own and method in ("ppo", "dpo") and not labelled:
        spec["data"]["split"] = {"sft": 2, "reward": 4, "ppo": 4} if method == "ppo" else {"sft": 2, "reward": 8}
    if labelled:
        spec["dpo"]["loss"] = "KTO"
    functions = spec["models"].get("reward", {}).get("functions", ())
    for function, weight in zip(functions, (1.0, 0.1), strict=False):
        function |= {"needs": "Sample", "weight": weight}
    return manifest


def commented(text: str, name: str, stages: Sequence[str], what: str, scratch: bool) -> str:
    """A manifest's YAML with comments: on its commands, and above fields."""
    shows = f"dovetail samples runs/{name}" if "ppo" in stages else f"dovetail chat runs/{name}"
    if list(stages) == ["sft"]:
        shows += " --model sft"
    commands = [
        ("dovetail validate job.yaml", "checks this file"),
        ("dovetail run job.yaml", "runs it on this machine"),
        (shows, "shows what the model says"),
        (f"dovetail explain RLHFJob.spec.{stages[-1]}", "describes a field, and the fields below it"),
    ]
    width = max(len(command) for command, _ in commands)
    lines = [f"# {what}", *(f"#   {command:<{width}}  {does}" for command, does in commands)]
    comments = _COMMENTS | ({"models.actor": _SCRATCH} if scratch else {})
    path: list[str] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip(" "))
        key = line.strip().partition(":")[0]
        if not line.lstrip().startswith("-"):
            path = [*path[: indent // 2], key]
            above = comments.get(".".join(path[1:]), "") if path[0] == "spec" else ""
            lines += [f"{' ' * indent}# {said}" for said in above.splitlines()]
        lines.append(line)
    return "\n".join(lines) + "\n"


def what_it_does(method: Method | Literal["agent"], labelled: bool) -> str:
    return _KTO if labelled else _WHAT[method]
