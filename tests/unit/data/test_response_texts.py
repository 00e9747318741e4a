"""What reward functions, metrics and pages get of a response: the special tokens that the model says, without those
that end it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dovetail.coordinator.data.text.texts import Texts

SPECIAL = ["<pad>", "<s>", "<|end|>", "<|eot|>", "<|im_start|>", "<|im_end|>"]
SAID = ["<think>", "</think>", "<|channel|>", "<|message|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = None, additional: bool = False) -> transformers.PreTrainedTokenizerFast:
    """Byte-level. `additional`: what the model says is in additional_special_tokens too."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIAL + SAID]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet)
    made.train_from_iterator(["the answer is 5"], trainer)
    more = {"additional_special_tokens": SAID} if additional else {}
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|end|>", pad_token="<pad>", **more
    )
    found.chat_template = template
    return found


def ids(tok: transformers.PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tok(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("additional", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        "<think>2 + 3</think>5",
        "<think></think>",
        "<|channel|>analysis<|message|>easy<|channel|>final<|message|>5",
        '<tool_call>{"name": "add"}</tool_call>',
        '[TOOL_CALLS][{"name": "add"}]',
        "5\n",
        "",
    ],
)
def test_what_the_model_says_is_kept_and_what_ends_it_is_cut(said: str, additional: bool) -> None:
    tok = tokenizer(additional=additional)
    for end in ("", "<|end|>", "<|end|><pad><pad>", "<pad>", "<s>"):
        found = Texts(tok).of(ids(tok, said + end))
        assert (found.text, found.raw) == (said, said + end)


def test_end_of_turn_tokens_are_those_of_the_model_and_the_template(tmp_path: Path) -> None:
    plain, chat = tokenizer(), tokenizer(CHATML)
    said = "<think>a</think>5"
    assert Texts(plain).of(ids(plain, said + "<|eot|>")).text == said + "<|eot|>"
    for listed in ([2, 3], 3):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
        assert Texts(plain, tmp_path).of(ids(plain, said + "<|eot|>")).text == said
    # The template ends a turn with <|im_end|> and a line, and the sequence with the end token.
    assert Texts(chat).of(ids(chat, said + "<|im_end|>\n<|end|>")).text == said
    assert Texts(chat).of(ids(chat, said + "\n<|im_end|>\n<|end|>")).text == said + "\n", "the line before it is said"
    # A turn that the model writes for somebody else is said, too.
    other = said + "<|im_end|>\n<|im_start|>user\nmore"
    assert Texts(chat).of(ids(chat, other + "<|end|>")).text == other


@pytest.mark.parametrize("config", ["{", "[]", '{"eos_token_id": null}', "{}"])
def test_a_configuration_without_end_tokens_changes_nothing(tmp_path: Path, config: str) -> None:
    (tmp_path / "generation_config.json").write_text(config)
    tok = tokenizer("{{ raise_exception('no') }}")
    assert Texts(tok, tmp_path).of(ids(tok, "<think>5<|end|>")).text == "<think>5"
