"""Writes the task of examples/agent.yaml into this folder: demonstrations, prompts and a tokenizer. It is the same each
time.

A demonstration opens one of the boxes, mostly not the one that was asked for, and says what it found. So a model that
has learnt them knows how to call the tool and how to report, and is right in about a quarter of the episodes."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOXES = ["red", "blue", "green", "black", "white", "brown", "pink", "grey"]
THINGS = ["coin", "ring", "pen", "cup"]
TOOLS = [{"type": "function", "function": {"name": "open", "parameters": {}}}]
MARKS = ["<|pad|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# As Qwen writes calls and their answers, but of the tools only their names.
TEMPLATE = """\
{%- if tools %}{{ "<|im_start|>system\\n" }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ "<|im_end|>\\n" }}{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}{{ "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- else %}{{ "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ "}\\n</tool_call>" }}{% endfor %}
{%- endif %}{{ "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""  # noqa: E501


def asked(box: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is in the {box} box?"}


def demonstration(draw: random.Random) -> dict[str, Any]:
    box = draw.choice(BOXES)
    opened = box if draw.random() < 0.15 else draw.choice(BOXES)
    found = f"a {draw.choice(THINGS)}"
    call = {"id": "call00000", "type": "function", "function": {"name": "open", "arguments": {"box": opened}}}
    messages = [
        asked(box),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": found, "name": "open", "tool_call_id": "call00000"},
        {"role": "assistant", "content": found},
    ]
    return {"messages": messages, "tools": TOOLS}


def prompt(draw: random.Random, box: str) -> dict[str, Any]:
    """Each box holds a thing, and what is asked for is in one box only."""
    thing = draw.choice(THINGS)
    others = [each for each in THINGS if each != thing]
    return {
        "messages": [asked(box)],
        "box": box,
        "things": {b: thing if b == box else draw.choice(others) for b in BOXES},
    }


def write_task(folder: Path) -> None:
    """Write demonstrations.jsonl, prompts.jsonl and the folder tokenizer."""
    draw = random.Random(0)
    rows = [demonstration(draw) for _ in range(1024)]
    prompts = [prompt(draw, box) for box in BOXES for _ in range(12)]
    for name, found in (("demonstrations.jsonl", rows), ("prompts.jsonl", prompts)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[AddedToken(mark, special=True) for mark in MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = {"pad_token": MARKS[0], "eos_token": MARKS[1], "chat_template": TEMPLATE}
    chat = PreTrainedTokenizerFast(tokenizer_object=made, **marks)
    texts = [chat.apply_chat_template(row["messages"], tools=TOOLS, tokenize=False) for row in rows]
    made.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, **marks).save_pretrained(folder / "tokenizer")


if __name__ == "__main__":
    write_task(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
