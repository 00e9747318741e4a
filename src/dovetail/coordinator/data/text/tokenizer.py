"""The job's tokenizer. It is loaded from a folder or a hub, or trained on the job's data. It does not need torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.text.chat_template import options_of, with_options
from dovetail.manifest.checks.model_contents import tokenizer_problem
from dovetail.manifest.checks.rules.data_rules import is_option
from dovetail.protocol.files.durable import read_object

PAD = "<|pad|>"
EOS = "<|eos|>"
# More characters than this hardly change a vocabulary, but take time.
MAX_TRAINING_CHARACTERS = 200_000_000


def train(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer with pad and end tokens, as a `PreTrainedTokenizerFast`.

    The vocabulary is smaller than `vocab_size` if the text has no more pairs to merge. Raises DataError if there is no
    text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    seen = 0

    def limited() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            if seen >= MAX_TRAINING_CHARACTERS:
                return
            seen += len(text)
            yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        limited(),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if not seen:
        raise DataError("spec.models.tokenizer.train: the job's data holds no text to train a tokenizer on")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def load(name: str | Path, field: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A Hugging Face tokenizer from a folder or hub name. `field` is the manifest field that names it. A missing pad
    token is replaced by the end token. Raises DataError if it cannot be loaded, or has no vocabulary or no end
    token."""
    mend = "copy the tokenizer's files into it, or name a tokenizer in spec.models.tokenizer.path"
    if Path(name).is_dir() and (why := tokenizer_problem(Path(name))) is not None:
        raise DataError(f"{field}: {why}; {mend}")
    try:
        if _is_plain(Path(name)):
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(name))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(name), revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many kinds of errors, all about the user's files
        message = " ".join(str(error).split())[:300]
        raise DataError(f"{field}: no tokenizer can be loaded from {name}: {message}") from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise DataError(f"{field}: the tokenizer in {name} has no vocabulary; {mend}")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{field}: the tokenizer {name} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.reply_ends = reply_ends(Path(name), tokenizer)
    # Long records are cut by the job's own limits, so transformers need not warn of them.
    getattr(tokenizer, "deprecation_warnings", {})[_LONG] = True
    return tokenizer


def reply_ends(model: Path, tokenizer: Any) -> list[str]:
    """The tokens that end a reply of the model besides the tokenizer's end token. Its generation_config.json has their
    ids. Gemma and Llama close a turn with such a token."""
    ids = [each for each in listed_ends(model) if 0 <= each < len(tokenizer)]
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]


def listed_ends(model: Path) -> list[int]:
    """The ids of the end tokens in a model's generation_config.json."""
    try:
        found = json.loads((model / "generation_config.json").read_bytes())["eos_token_id"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)]


# The key of transformers' warning that a text is longer than the model allows.
_LONG = "sequence-length-is-longer-than-the-specified-maximum"


def with_template_options(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    """The tokenizer with chat templates that have `options` (data.chatTemplateKwargs) as their defaults. Every folder
    to which it is saved has these templates. Raises DataError if it has no template, or none that uses an option."""
    if not options:
        return tokenizer
    field, templates = "spec.data.chatTemplateKwargs", getattr(tokenizer, "chat_template", None)
    if not templates:
        raise DataError(f"{field}: the tokenizer has no chat template, so there are no options; remove the field")
    every = templates if isinstance(templates, dict) else {"default": templates}
    names, certain = set[str](), set[str]()
    for template in every.values():
        try:
            found, outer = options_of(template)
        except ValueError as error:
            raise DataError(f"{field}: the tokenizer's chat template cannot be read: {error}") from error
        names, certain = names | found, certain | outer
    if unknown := [name for name in options if name not in names]:
        known = ", ".join(sorted(name for name in certain if is_option(name))) or "no options"
        raise DataError(f"{field}: the tokenizer's chat template does not use {unknown[0]!r}; it uses {known}")
    made = {name: with_options(template, options) for name, template in every.items()}
    tokenizer.chat_template = made if isinstance(templates, dict) else made["default"]
    return tokenizer


def _is_plain(folder: Path) -> bool:
    """Whether tokenizer.json has everything. (AutoTokenizer would also work, but it imports torch if torch is
    installed.)"""
    config = read_object(folder / "tokenizer_config.json")
    plain = config.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return plain and "auto_map" not in config and (folder / "tokenizer.json").is_file()
