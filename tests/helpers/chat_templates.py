"""Published chat templates, and small tokenizers of each kind, to write conversations with."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = [
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|end|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|User|>", "<|Assistant|>", "<think>", "</think>"),
]
SAID = [
    "What is two plus three? It is 5.",
    "the cat has small fur",
    "user assistant system weather Bern dry",
    "Be kind.",
]
KINDS = ["bytes", "first", "always", "never", "prepend", "unigram", "wordpiece"]


def built(kind: str, adds: bool) -> Tokenizer:
    """A small tokenizer of a kind. `adds`: it writes special tokens around a text that it is given."""
    trainer: dict[str, Any] = {"vocab_size": 480, "show_progress": False, "special_tokens": SPECIAL}
    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.train_from_iterator(SAID * 20, trainers.WordPieceTrainer(**trainer))
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        made.train_from_iterator(SAID * 20, trainers.UnigramTrainer(**trainer, unk_token="<unk>"))
    elif kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(SAID * 20, trainers.BpeTrainer(**trainer))
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        if kind == "prepend":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        trainer["special_tokens"] = SPECIAL + [f"<0x{i:02X}>" for i in range(256)]
        made.train_from_iterator([f" {each}" for each in SAID] * 20, trainers.BpeTrainer(**trainer))
    if adds:
        around = "<s> $A </s>" if kind == "wordpiece" else "<s> $A"
        ids = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    return made


def with_template(tokens: Tokenizer, template: str | None, end: str) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token=end, unk_token="<unk>", chat_template=template
    )


def shipped() -> dict[str, tuple[str, str]]:
    """Every chat template that the installed packages ship as a file."""
    found: dict[str, tuple[str, str]] = {}
    for package in ("transformers", "trl", "vllm"):
        place = importlib.util.find_spec(package)
        for root in (place.submodule_search_locations or []) if place is not None else []:
            for file in sorted(Path(root).rglob("*.jinja")):
                text = file.read_text(encoding="utf-8")
                if "messages" in text:
                    ends = [end for end in ("<|im_end|>", "<|return|>", "<|eot_id|>") if end in text]
                    found[f"{package}: {file.stem}"] = (text, (ends or ["</s>"])[0])
    return found


# The tokens with which a model ends a turn, by the first that a template has: the tokenizer's end token, and then those
# that the models' generation_config.json name besides it.
_ENDS = [
    ("<｜end▁of▁sentence｜>",),
    ("<turn|>", "<|tool_response>"),
    ("<|END_OF_TURN_TOKEN|>",),
    ("<|user|>", "<|observation|>"),
    ("<|im_end|>",),
    ("<|return|>", "<|call|>"),
    ("<|eot_id|>",),
    ("<end_of_turn>",),
    ("<|end|>",),
    ("<|eot|>",),
    ("</s>",),
]


def with_ends(tokens: Tokenizer, template: str) -> Any:
    """A tokenizer as the model of a published template has it: the tokens that end a turn are tokens of their own."""
    ends = next((each for each in _ENDS if each[0] in template), _ENDS[-1])
    made = with_template(tokens, template, ends[0])
    made.add_tokens(list(ends), special_tokens=True)
    made.reply_ends = list(ends[1:])
    return made


def _function(name: str) -> dict[str, Any]:
    kinds = {"city": "string", "days": "integer", "exact": "boolean"}
    properties = {each: {"type": kind, "description": f"the {each}"} for each, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": f"SCHEMA {name}", "parameters": parameters}}


TOOLS = [_function("weather"), _function("forecast")]


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(number: int, *names: str, content: str = "") -> list[dict[str, Any]]:
    """A message of the assistant that calls tools, and the tools' answers."""
    ids = [f"call{number:04d}{n}" for n in range(len(names))]
    calls = [
        {"type": "function", "id": id, "function": {"name": name, "arguments": {"city": "Bern", "exact": True}}}
        for id, name in zip(ids, names, strict=True)
    ]
    answers = [
        said("tool", f"TOOL{number}{n}", tool_call_id=id, name=name)
        for n, (id, name) in enumerate(zip(ids, names, strict=True))
    ]
    return [said("assistant", content, tool_calls=calls), *answers]


_ONCE = [said("user", "USER1?"), *called(1, "weather"), said("assistant", "SAID1.")]
# What is not the assistant's is in capitals, but for SAID.
TOOL_CONVERSATIONS = {
    "once": _ONCE,
    "with words": [_ONCE[0], *called(1, "weather", content="SAID0"), _ONCE[-1]],
    "two at once": [_ONCE[0], *called(1, "weather", "forecast"), _ONCE[-1]],
    "one after the other": [_ONCE[0], *called(1, "weather"), *called(2, "forecast"), _ONCE[-1]],
    "two questions": [*_ONCE, said("user", "USER2?"), *called(2, "forecast"), said("assistant", "SAID2.")],
    "with a system": [said("system", "SYSTEM"), *_ONCE],
}
NOT_LEARNT = ("USER1", "USER2", "TOOL10", "TOOL11", "TOOL20", "SYSTEM", "SCHEMA")


@functools.cache
def byte_tokens() -> Tokenizer:
    """Threads train it: not when the file is imported, or the workers could not be forked."""
    return built("bytes", adds=False)
