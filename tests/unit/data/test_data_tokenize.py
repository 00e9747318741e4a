"""Truncation, masks and padding of batches, and the tokenizers that are trained or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.records import Demonstration, Preference
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.coordinator.data.text.tokenize import Encoder, by_length, ppo_batch, reward_batch, sft_batch


class Characters:
    """A tokenizer of one token a character."""

    eos_token_id, pad_token_id = 1, 0

    def __init__(self, bos: bool = False) -> None:
        self.bos_token_id = 2 if bos else None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        bos = [2] if self.bos_token_id and add_special_tokens else []
        return {"input_ids": bos + [ord(c) for c in text]}


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_a_demonstration_learns_response_and_end() -> None:
    batch = sft_batch(
        [Encoder(Characters(), 9, 20).demonstration(Demonstration.of(p, r)) for p, r in [("ab", "c"), ("", "x")]], 0
    )
    assert batch["tokens"].tolist() == [[*ids("abc"), 1], [*ids("x"), 1, 0, 0]]
    assert batch["lengths"].tolist() == [4, 2]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert [batch[k].dtype for k in ("tokens", "lengths", "loss_mask")] == [np.int32, np.int32, np.uint8]


def test_turns_between_responses_are_not_learnt() -> None:
    record = Demonstration("abcdefghi", ((2, 3), (5, 6), (7, 9)))
    batch = sft_batch([Encoder(Characters(), 9, 20).demonstration(record)], 0)
    assert batch["tokens"].tolist() == [[*ids("abcdefghi"), 1]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0, 0, 1, 0, 1, 1, 1]]
    for most in range(3, 10):
        cut = sft_batch([Encoder(Characters(), 2, most).demonstration(record)], 0)
        assert cut["tokens"].tolist() == [row[:most] for row in batch["tokens"].tolist()]
        assert cut["loss_mask"].tolist() == [row[:most] for row in batch["loss_mask"].tolist()]


def test_prompts_keep_their_last_tokens_and_the_first_of_all() -> None:
    assert Encoder(Characters(), 3, 20).prompt("abcdef") == ids("def")
    assert Encoder(Characters(bos=True), 3, 20).prompt("abcdef") == [2, *ids("ef")]


def test_a_truncated_response_keeps_its_start_and_has_no_end() -> None:
    encoded = Encoder(Characters(), 4, 7).demonstration(Demonstration.of("abcdef", "123456"))
    assert encoded.tokens == ids("cdef123")
    assert encoded.prompt_length == 4


@given(st.text("ab", max_size=30), st.text("12", max_size=30), st.integers(1, 20), st.integers(2, 20), st.booleans())
def test_limits_hold(prompt: str, response: str, most_prompt: int, most: int, bos: bool) -> None:
    encoder = Encoder(Characters(bos), most_prompt, most)
    encoded = encoder.demonstration(Demonstration.of(prompt, response))
    assert encoded.prompt_length <= len(encoded.tokens) <= most
    assert encoded.prompt_length <= max(most_prompt, 1)
    assert encoded.prompt_length < len(encoded.tokens)  # something is left to learn


def test_reward_batch_pads_each_side_by_itself() -> None:
    pair = Encoder(Characters(), 9, 20).preference(Preference("a", "bcd", "e"))
    batch = reward_batch([pair], 0)
    assert batch["chosen_tokens"].tolist() == [[*ids("abcd"), 1]]
    assert batch["rejected_tokens"].tolist() == [[*ids("ae"), 1]]
    assert (batch["chosen_lengths"].tolist(), batch["rejected_lengths"].tolist()) == ([5], [3])


def test_ppo_batch() -> None:
    batch = ppo_batch([[5, 6], [7]], [[8], [9, 1]], pad=0)
    assert batch["tokens"].tolist() == [[5, 6, 8], [7, 9, 1]]
    assert (batch["prompt_lengths"].tolist(), batch["response_lengths"].tolist()) == ([2, 1], [1, 2])


@given(st.lists(st.integers(1, 99), max_size=40), st.integers(1, 8))
def test_by_length_takes_every_row_once_in_order_of_length(lengths: list[int], size: int) -> None:
    groups = by_length(lengths, size)
    flat = [i for group in groups for i in group]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[i] for i in flat] == sorted(lengths)
    assert all(len(group) == size for group in groups[:-1])


def save_trained(folder: Path) -> Any:
    tokenizer = tokenizers.train(["the cat is small", "the dog is loud"] * 20, 280)
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def test_a_trained_tokenizer_survives_the_disk_and_any_text(tmp_path: Path) -> None:
    trained = save_trained(tmp_path)
    loaded = tokenizers.load(tmp_path, "spec.models.tokenizer")
    assert 258 < len(loaded) <= 280
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    for text in (" the cat is loud", "\n\nHuman: çà – 猫 🐈  two  spaces , dot ."):
        encoded = Encoder(loaded, 99, 999).encode(text)
        assert encoded == Encoder(trained, 99, 999).encode(text)
        assert loaded.decode(encoded) == text
    assert len(Encoder(loaded, 99, 99).encode(" cat")) < 4


def test_training_is_deterministic(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_trained(tmp_path / name)
    assert (tmp_path / "a/tokenizer.json").read_text() == (tmp_path / "b/tokenizer.json").read_text()


def test_bad_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer.path: .* holds no tokenizer: tokenizer.json is missing; copy"):
        tokenizers.load(tmp_path, "spec.models.tokenizer.path")
    with pytest.raises(DataError, match="holds no text"):
        tokenizers.train([], 300)
    save_trained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({k: v for k, v in fields.items() if k != "pad_token"}))
    assert tokenizers.load(tmp_path, "f").pad_token_id == 1
    config.write_text(json.dumps({k: v for k, v in fields.items() if k != "eos_token"}))
    with pytest.raises(DataError, match="has no end-of-sequence token; set eos_token"):
        tokenizers.load(tmp_path, "f")


@pytest.mark.slow
def test_a_tokenizer_may_be_a_sentencepiece_file_alone(tmp_path: Path) -> None:
    """Older Llama folders have no tokenizer.json. sentencepiece wanted a newer protobuf than the one that we pin."""
    import sentencepiece

    text = tmp_path / "words.txt"
    text.write_text("What is two plus three? The answer is five.\nhello there how are you\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    loaded = tokenizers.load(tmp_path, "spec.models.actor.source")
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert Encoder(loaded, 99, 99).encode("What is five?") == own.encode("What is five?")
