"""The base model of a task: a small Llama, trained on some right answers for long enough to be right now and then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from race.tasks import prompts, score

PAD, EOS, UNK = 0, 1, 2
CONFIG: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
TRAINED, HELD_OUT = 2048, 256
ENOUGH, MOST_STEPS = 0.55, 3000


def tokenizer() -> Any:
    """One token a word, so that text and token ids say the same."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", "=", *(str(digit) for digit in range(10))]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_base(task: str, folder: Path, enough: float = ENOUGH) -> float:
    """Write the model, prompts.jsonl and held_out.jsonl. Returns the model's score, sampled on the held-out prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    records = prompts(task, TRAINED + HELD_OUT, 0)
    for name, part in (("prompts", records[:TRAINED]), ("held_out", records[TRAINED:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG))
    tokens = tokenizer()
    demonstrations = prompts(task, 8192, 1)
    whole = torch.tensor([[*tokens(f"{each['prompt']} {each['answer']}")["input_ids"], EOS] for each in demonstrations])
    prompt = len(tokens(demonstrations[0]["prompt"])["input_ids"])
    labels = whole.clone()
    labels[:, :prompt] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    found = 0.0
    for step in range(MOST_STEPS):
        rows = torch.randint(len(whole), (64,))
        model(input_ids=whole[rows], labels=labels[rows]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            found = judge(model, tokens, records[TRAINED:])["sampled"]
            if found >= enough:
                break
    model.eval().save_pretrained(folder)
    tokens.save_pretrained(folder)
    return found


@torch.no_grad()
def judge(model: Any, tokens: Any, records: list[dict[str, str]]) -> dict[str, float]:
    """The mean score of greedy and of sampled answers to the records' prompts."""
    from race.tasks import SETTINGS

    ids = torch.tensor([tokens(record["prompt"])["input_ids"] for record in records])
    found = {}
    state = torch.random.get_rng_state()
    for name, options in (("greedy", {"do_sample": False}), ("sampled", {"do_sample": True, "top_k": 0})):
        torch.manual_seed(0)
        said = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=SETTINGS["max_tokens"], **options
        )[:, ids.shape[1] :]
        texts = [tokens.decode(row, skip_special_tokens=True) for row in said.tolist()]
        scores = score([], texts, [record["answer"] for record in records])
        found[name] = sum(scores) / len(scores)
    torch.random.set_rng_state(state)
    return found


def judge_folder(folder: Path, base: Path) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return judge(model, tokenizer(), [json.loads(line) for line in (base / "held_out.jsonl").read_text().splitlines()])
