"""A Qwen3 of two small layers with tied weights, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path


def save_tiny_qwen(folder: Path) -> None:
    """Random weights, and a tokenizer of 300 tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from dovetail.coordinator.data import synthetic
    from dovetail.coordinator.data.text import tokenizer

    texts = [text for i in range(50) for text in synthetic.demonstration(i, "tiny")]
    made = tokenizer.train(texts, 300)
    made.save_pretrained(str(folder))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(made),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=made.eos_token_id,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(str(folder))
