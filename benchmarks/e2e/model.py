"""The benchmark's models: a small Llama whose responses are as long-tailed as chat's, and value models on its body.

The Llama has random weights, but after each token the end token comes with probability 1/32. So sampled lengths are
geometric: mean about 32, cut at 128, and of a batch of 64 some response nearly always comes near that."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from e2e.settings import Folder, Settings

PAD, EOS, UNK, WORDS = 0, 1, 2, 3
VOCABULARY = 512
END_RATE = 1 / 32
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
COMMON, NEVER = 0.04, -15.0


def make_models(folder: Folder, settings: Settings) -> None:
    """Write actor, reward and critic folders and prompts.jsonl, all at once or not at all."""
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.path.parent) as temporary:
        made = Folder(Path(temporary) / "made")
        made.path.mkdir()
        _write(made, settings)
        if folder.path.exists():
            shutil.rmtree(folder.path)
        made.path.rename(folder.path)


def _write(folder: Folder, settings: Settings) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(settings.seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG))
    set_end_rate(model, settings)
    tokens = tokenizer()
    model.eval().save_pretrained(folder.actor)
    tokens.save_pretrained(folder.actor)
    for number, path in enumerate((folder.reward, folder.critic)):
        value: Any = LlamaForSequenceClassification(LlamaConfig(**CONFIG, num_labels=1))
        value.model.load_state_dict(model.model.state_dict())
        torch.manual_seed(settings.seed + 1 + number)
        # The last norm's output has unit scale, so scores and values are of the order of 1.
        torch.nn.init.normal_(value.score.weight, std=CONFIG["hidden_size"] ** -0.5)
        value.eval().save_pretrained(path)
        tokens.save_pretrained(path)
    ids = random_tokens((settings.batch, settings.prompt_tokens), torch.Generator().manual_seed(settings.seed + 9))
    lines = [json.dumps({"prompt": " ".join(tokens.convert_ids_to_tokens(row))}) for row in ids.tolist()]
    folder.prompts.write_text("\n".join(lines) + "\n")


def tokenizer() -> Any:
    """One token a word, so that text and token ids say the same."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(WORDS, VOCABULARY)]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def random_tokens(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(WORDS, VOCABULARY, shape, generator=generator)


@torch.no_grad()
def set_end_rate(model: Any, settings: Settings) -> None:
    """Make the end token follow any other with probability END_RATE, nearly, and the other special tokens never.

    All embeddings share a component, so the last norm's outputs have a common mean; the special tokens' rows of the
    vocabulary projection are multiples of it."""
    generator = torch.Generator().manual_seed(settings.seed)
    model.model.embed_tokens.weight += COMMON * torch.randn(CONFIG["hidden_size"], generator=generator)
    tokens = random_tokens((8, settings.prompt_tokens + settings.max_new_tokens), generator)
    hidden = model.model(input_ids=tokens).last_hidden_state.flatten(0, 1)
    mean = hidden.mean(0) / hidden.mean(0).square().sum()
    head = model.lm_head.weight
    head[[PAD, UNK]] = NEVER * mean
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        head[EOS] = middle * mean
        rate = torch.softmax(hidden @ head.T, dim=-1)[:, EOS].mean()
        low, high = (middle, high) if rate < END_RATE else (low, middle)
