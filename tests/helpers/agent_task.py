"""Writes a task for an agent: demonstrations that call a tool, prompts, and a tokenizer whose template writes calls.

The environment is `helpers.boxes`. Half of the demonstrations' calls open some box, and half of the answers name some
thing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOXES = ["red", "blue", "green", "black"]
THINGS = ["coin", "ring", "pen", "cup"]
TOOLS = [{"type": "function", "function": {"name": "open", "parameters": {}}}]
MARKS = ["<|pad|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATE = (
    '{%- if tools %}{{ "<|im_start|>system\\n" }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}'
    '{{ "<|im_end|>\\n" }}{% endif %}'
    "{%- for message in messages %}"
    '{%- if message.role == "tool" %}'
    '{{ "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}'
    '{%- else %}{{ "<|im_start|>" + message.role + "\\n" + message.content }}'
    "{%- for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    '{{ call.function.arguments | tojson }}{{ "}\\n</tool_call>" }}{% endfor %}'
    '{%- endif %}{{ "<|im_end|>\\n" }}'
    "{%- endfor %}"
    '{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}'
)


def _asked(box: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is in the {box} box?"}


def _demonstration(draw: random.Random) -> dict[str, Any]:
    box, thing = draw.choice(BOXES), draw.choice(THINGS)
    opened = box if draw.random() < 0.5 else draw.choice(BOXES)
    found = f"a {thing}" if opened == box else "nothing"
    said = found if opened == box and draw.random() < 0.5 else f"a {draw.choice(THINGS)}"
    call = {"id": "call00000", "type": "function", "function": {"name": "open", "arguments": {"box": opened}}}
    messages = [
        _asked(box),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": found, "name": "open", "tool_call_id": "call00000"},
        {"role": "assistant", "content": said},
    ]
    return {"messages": messages, "tools": TOOLS}


def write_task(folder: Path) -> None:
    """Write demonstrations.jsonl, prompts.jsonl and the folder tokenizer. They are the same each time."""
    draw = random.Random(0)
    rows = [_demonstration(draw) for _ in range(512)]
    prompts = [{"messages": [_asked(box)], "box": box, "thing": thing} for box in BOXES for thing in THINGS]
    for name, found in (("demonstrations.jsonl", rows), ("prompts.jsonl", prompts * 4)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [AddedToken(mark, special=True) for mark in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([json.dumps(row["messages"]) for row in rows], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=MARKS[0], eos_token=MARKS[1], chat_template=TEMPLATE
    ).save_pretrained(folder / "tokenizer")
