"""Prepares the tokenizer, model folders and data that a job needs before its first step. It may be repeated at any
time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.coordinator.data.collection import Collection, Place, StageData, collect, needed
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.data_files import content_digest
from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.coordinator.data.downloads.model_folders import check_scores, check_weights, resolve, scratch_config
from dovetail.coordinator.data.fingerprints import Fingerprint
from dovetail.coordinator.data.records import Prompt, equal_pairs, plain_fields
from dovetail.coordinator.data.sources import CHECKED, Rows
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.coordinator.data.text.chat_template import ChatFormat, chat_format
from dovetail.coordinator.data.text.tokenize import (
    Encoded,
    Encoder,
    Row,
    by_length,
    dpo_batch,
    labelled_batch,
    reward_batch,
    sft_batch,
)
from dovetail.coordinator.data.token_table import Tokenizing, TokenTable, token_table
from dovetail.manifest.checks.hub_names import hub_problem
from dovetail.manifest.checks.model_contents import model_config
from dovetail.manifest.fixed_names import MODEL_NAMES, DataKind
from dovetail.manifest.model_families.support import family_of, target_problem
from dovetail.manifest.sizes import TRAINED, owner
from dovetail.manifest.types import LoRA, ModelSource, RLHFJobSpec, ScratchModel, Stage, TrainedModel
from dovetail.protocol.files.durable import sync
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.process.env import ACTOR_CONFIG
from dovetail.protocol.sampling import derived_seed
from dovetail.protocol.wire import Arrays

CENTRING_LIMIT = 512
EQUAL_LIMIT = 1024


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of an iteration. `index` counts from 0 in the iteration. `fields` has the record's other fields. A
    field that only other prompts of PPO or of the evaluations have is None."""

    index: int
    text: str
    token_ids: list[int]
    fields: dict[str, Any]


# A user gives a prompt as its text, or as a record with the text in "prompt" and further fields for reward functions.
GivenPrompt = str | Mapping[str, Any]


def given_prompt(given: GivenPrompt) -> tuple[str, dict[str, Any]]:
    """The text and the other fields of a given prompt. Raises ValueError for a record without a text, or with a field
    that JSON cannot hold."""
    if isinstance(given, str):
        return given, {}
    text = given.get("prompt") if isinstance(given, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(f'a prompt is a string, or a record with the text in "prompt"; this one is {given!r}')
    others = {name: value for name, value in given.items() if name != "prompt"}
    return text, plain_fields(others, f"prompt {text[:40]!r}")


class Made(Sequence[Arrays]):
    """Batches that are made when they are asked for, of the records at `groups`."""

    def __init__(self, groups: list[list[Place]], make: Callable[[Sequence[Place]], Arrays]) -> None:
        self._groups, self._make = groups, make

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: Any) -> Any:
        return self._make(self._groups[index])


class Prepared:
    """The batches of every stage, which depend only on the step, and the folders of the job's models.

    `run_dir` is the run's folder, which `prepare` has filled. `sources` has the source of each model that has one in
    the manifest. A source is a folder with weights, or a configuration for random weights. Steps and iterations count
    from 1. Methods raise DataError for a malformed record of a table, and ValueError for a list that the job does not
    have."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        run_dir: Path,
        sources: dict[str, Path | ScratchModel],
        tokenizer: Any,
        data: Collection,
        chat: ChatFormat,
    ) -> None:
        self.spec = spec
        self.tokenizer_dir, self.actor_config_dir = _tokenizer_dir(run_dir), run_dir / ACTOR_CONFIG
        self.sources = sources
        self.tokenizer = tokenizer
        self.data = data
        self.chat = chat
        self.encoder = Encoder(tokenizer, spec.data.max_prompt_tokens, spec.data.max_tokens)
        self._tables: dict[DataKind, TokenTable] = {}

    @property
    def eos_token_id(self) -> int:
        return self.encoder.eos

    @property
    def pad_token_id(self) -> int:
        return self.encoder.pad

    def model_ref(self, name: str) -> ModelRef | None:
        """The initial weights of actor, critic, reward or reference. None if the manifest does not name them."""
        return own_model(self.spec, name, self.sources, self.tokenizer_dir)

    def steps_per_epoch(self, stage: Stage) -> int:
        """The number of optimizer steps that use every record once. For PPO it is the number of iterations."""
        if stage is Stage.SFT:
            return _have(self.data.demonstrations, "demonstrations").steps_per_epoch(self.spec.sft.batch_size)
        if stage.has_pairs:
            size = self.spec.supervised(stage).batch_size
            return _have(self.data.preferences, "preferences").steps_per_epoch(size)
        return _have(self.data.prompts, "prompts").steps_per_epoch(self._prompts_per_iteration)

    def total_steps(self, stage: Stage) -> int:
        """The number of optimizer steps of SFT, reward training or DPO. It follows from `steps` or from the epochs over
        the data. For PPO it is the number of iterations."""
        if stage is Stage.PPO:
            return self.spec.ppo.iterations
        training = self.spec.supervised(stage)
        return training.steps or training.epochs * self.steps_per_epoch(stage)

    def tokenise(self, note: Callable[[str], None] = lambda _: None) -> None:
        """Make the token ids of all records that the job's steps and evaluations use, unless the run's folder has them.
        `note` gets sentences about the progress. Raises DataError for a malformed record, and OSError."""
        for kind in needed(self.spec):
            if kind != "prompts":
                self._tables[kind] = self._made(kind, note)

    def _table(self, kind: DataKind) -> TokenTable:
        if kind not in self._tables:
            self.tokenise()
        return self._tables[kind]

    def _made(self, kind: DataKind, note: Callable[[str], None]) -> TokenTable:
        data: StageData[Any] = _have(getattr(self.data, kind), kind)
        spec, stages = self.spec, set(self.spec.stages)
        used = [np.zeros(len(part.records), np.bool_) for part in data.parts]

        def mark(places: Iterable[Place]) -> None:
            for source, record in places:
                used[source][record] = True

        mark(data.held_out_places())
        if kind == "demonstrations":
            batches = [(self.total_steps(Stage.SFT), spec.sft.batch_size)] if Stage.SFT in stages else []
            if Stage.PPO in stages and spec.ppo.ptx_coef > 0:
                batches.append((spec.ppo.iterations, spec.ppo.global_batch_size))
            if Stage.REWARD in stages:
                mark(self._centring())
        else:
            batches = [(self.total_steps(s), spec.supervised(s).batch_size) for s in stages if s.has_pairs]
            mark(data.places(1, min(len(data), EQUAL_LIMIT)))
        for steps, size in batches:
            # A single source has had all its records after an epoch.
            for step in range(1, 1 + (steps if len(used) > 1 else min(steps, data.steps_per_epoch(size)))):
                mark(data.places(step, size))
        places = [np.flatnonzero(each) for each in used]
        depends = [
            CHECKED,
            {name: version(name) for name in ("dovetail-rlhf", "tokenizers", "transformers")},
            spec.data.model_dump(mode="json"),
            spec.seed,
            {name: print_ for name, print_ in self.data.fingerprints.items() if f".{kind}[" in name},
            [part.records.files for part in data.parts if isinstance(part.records, Rows)],
            self._tokenizer_files,
        ]
        path = self.tokenizer_dir.parent / "cache" / "tokens" / f"{kind}.bin"
        by = Tokenizing(self.encoder, self.tokenizer_dir, _trusts(spec, "actor"))
        return token_table(path, json.dumps(depends, sort_keys=True), data, places, by, note)

    @cached_property
    def _tokenizer_files(self) -> dict[str, str]:
        return {p.name: content_digest(p) for p in sorted(self.tokenizer_dir.rglob("*")) if p.is_file()}

    def sft_batch(self, step: int) -> Arrays:
        return self._sft_batch(_have(self.data.demonstrations, "demonstrations").places(step, self.spec.sft.batch_size))

    def reward_batch(self, step: int) -> Arrays:
        places = _have(self.data.preferences, "preferences").places(step, self.spec.reward.batch_size)
        return self._reward_batch(places)

    def dpo_batch(self, step: int) -> Arrays:
        return self._dpo_batch(_have(self.data.preferences, "preferences").places(step, self.spec.dpo.batch_size))

    def sft_eval_batches(self) -> Made:
        """The held-out demonstrations in batches of `sft.batchSize`, sorted by length. The last batch may be
        smaller."""
        places = _have(self.data.demonstrations, "demonstrations").held_out_places()
        return self._by_length("demonstrations", places, self.spec.sft.batch_size, self._sft_batch)

    def scored_demonstrations(self) -> Made:
        """The demonstrations that centre the reward model's scores, at most 512, in batches of `reward.batchSize`. They
        are held out. If none are held out, they are the first ones to train on. There are none if the job reads no
        demonstrations."""
        if self.data.demonstrations is None:
            return Made([], self._sft_batch)
        return self._by_length("demonstrations", self._centring(), self.spec.reward.batch_size, self._sft_batch)

    def _centring(self) -> list[Place]:
        data = _have(self.data.demonstrations, "demonstrations")
        return data.held_out_places()[:CENTRING_LIMIT] or list(islice(data.training_places(), CENTRING_LIMIT))

    def reward_eval_batches(self) -> Made:
        """The held-out pairs in batches of `reward.batchSize`, sorted by length. The last batch may be smaller."""
        places = _have(self.data.preferences, "preferences").held_out_places()
        return self._by_length("preferences", places, self.spec.reward.batch_size, self._reward_batch)

    def dpo_eval_batches(self) -> Made:
        """The held-out pairs, or labelled responses, in batches of `dpo.batchSize`, sorted by length. The last batch
        may be smaller."""
        places = _have(self.data.preferences, "preferences").held_out_places()
        return self._by_length("preferences", places, self.spec.dpo.batch_size, self._dpo_batch)

    def _by_length(
        self, kind: DataKind, places: list[Place], size: int, make: Callable[[Sequence[Place]], Arrays]
    ) -> Made:
        table = self._table(kind)
        groups = by_length([sum(len(row.tokens) for row in table[place]) for place in places], size)
        return Made([[places[i] for i in group] for group in groups], make)

    def _sft_batch(self, places: Sequence[Place], prefix: str = "") -> Arrays:
        table = self._table("demonstrations")
        return sft_batch([row for place in places for row in table[place]], self.encoder.pad, prefix)

    def _pairs(self, places: Sequence[Place]) -> list[tuple[Encoded, Encoded]]:
        """The pairs of a job whose preferences are pairs. `collect` has checked that they are."""
        table = self._table("preferences")
        return [(chosen, rejected) for chosen, rejected in (table[place] for place in places)]

    def _reward_batch(self, places: Sequence[Place]) -> Arrays:
        return reward_batch(self._pairs(places), self.encoder.pad)

    def _dpo_batch(self, places: Sequence[Place]) -> Arrays:
        longest, pad, table = self.encoder.max_tokens, self.encoder.pad, self._table("preferences")
        if places and len(table[places[0]]) == 1:
            rows, good = [table[place][0] for place in places], [table.good(place) for place in places]
            return labelled_batch(rows, good, pad, longest)
        return dpo_batch(self._pairs(places), pad, longest if self.spec.dpo.loss == "KTO" else None)

    def first_texts(self) -> Iterator[tuple[DataKind, str, str]]:
        """For each list of the job: the text of its first record as the model gets it, with all special tokens, up to
        what is learnt (or drawn), and what is learnt. Of a pair it is the chosen response."""
        for kind in needed(self.spec):
            (record,) = getattr(self.data, kind).batch(1, 1)
            ids: Row
            if isinstance(record, Prompt):
                ids, given = self.encoder.prompt(record.prompt), None
            else:
                encoded = self.encoder.sequences(record)[0]
                ids, given = encoded.tokens, encoded.prompt_length
            yield kind, self.tokenizer.decode(ids[:given]), "" if given is None else self.tokenizer.decode(ids[given:])

    def equal_pairs(self) -> str:
        """A warning if some of the first 1,024 pairs have equal replies, because nothing is learnt from these. "" if
        there are none."""
        preferences, table = _have(self.data.preferences, "preferences"), self._table("preferences")
        first = [table[place] for place in preferences.places(1, min(len(preferences), EQUAL_LIMIT))]
        equal = sum(len(rows) == 2 and np.array_equal(rows[0].tokens, rows[1].tokens) for rows in first)
        return equal_pairs(equal, f"the first {len(first):,} pairs") if equal else ""

    def prompts(self, iteration: int) -> list[PromptRecord]:
        """The prompts of a PPO iteration. There are globalBatchSize / samplesPerPrompt of them."""
        records = _have(self.data.prompts, "prompts").batch(iteration, self._prompts_per_iteration)
        return self._prompt_records([(r.prompt, self._filled(r.fields)) for r in records])

    def further_prompts(
        self, iteration: int, round_number: int, count: int, known: Container[str]
    ) -> list[PromptRecord]:
        """`count` prompts of a further round (1, 2, ...) of dynamic sampling. They are drawn from the data in a
        separate order, so the first prompts of iterations do not depend on them. Prompts whose text is in `known` are
        used only if there are too few others."""
        each = self._prompts_per_iteration
        number = (iteration - 1) * self.spec.ppo.dynamic_sampling + round_number
        drawn = self._further.batch(number, 2 * each)
        new: dict[str, Prompt] = {}
        for record in drawn:
            if record.prompt not in known:
                new.setdefault(record.prompt, record)
        chosen = [*new.values(), *drawn][:count]
        return self._prompt_records([(r.prompt, self._filled(r.fields)) for r in chosen])

    @cached_property
    def _further(self) -> StageData[Prompt]:
        return StageData(_have(self.data.prompts, "prompts").parts, self.spec.seed, "prompts", "further")

    def given_prompts(self, prompts: Sequence[GivenPrompt]) -> list[PromptRecord]:
        """The records of prompts that the user gives. Raises ValueError."""
        return self._prompt_records([given_prompt(each) for each in prompts])

    def evaluation_prompts(self) -> list[PromptRecord]:
        """The prompts that evaluations answer. PPO never trains on them, unless the manifest names them twice."""
        nothing = dict.fromkeys(sorted(self.data.evaluation_fields))
        records = self.data.evaluation_prompts(self.spec.evaluation.held_out)
        return self._prompt_records([(r.prompt, nothing | r.fields) for r in records])

    def for_rewards(self, records: Sequence[PromptRecord]) -> list[PromptRecord]:
        """Prompts of an evaluation in the form for the job's reward functions, with every field that they get in
        PPO."""
        return [replace(record, fields=self._filled(record.fields)) for record in records]

    def ptx_batch(self, iteration: int) -> Arrays:
        """The arrays `ptx_tokens` (N,T) int32, `ptx_lengths` (N,) int32 and `ptx_loss_mask` (N,T) uint8. N is the
        number of samples in the iteration."""
        demonstrations = _have(self.data.demonstrations, "demonstrations")
        places = demonstrations.places(iteration, self.spec.ppo.global_batch_size)
        if iteration > self.spec.ppo.iterations:  # a loop of one's own, whose records are not in the table
            records = [demonstrations.parts[source].records[record] for source, record in places]
            rows = [row for record in records for row in self.encoder.sequences(record)]
            return sft_batch(rows, self.encoder.pad, "ptx_")
        return self._sft_batch(places, "ptx_")

    @property
    def _prompts_per_iteration(self) -> int:
        return self.spec.ppo.global_batch_size // self.spec.ppo.samples_per_prompt

    def _filled(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A prompt's fields, and None for each field that only other prompts of PPO have. So a reward function gets the
        same names in every iteration, whichever records a batch has."""
        return {**self._no_fields, **fields}

    @cached_property
    def _no_fields(self) -> dict[str, Any]:
        return dict.fromkeys(sorted(self.data.prompt_fields))

    def _prompt_records(self, prompts: Sequence[tuple[str, dict[str, Any]]]) -> list[PromptRecord]:
        return [
            PromptRecord(i, text, self.encoder.prompt(text), fields | self._asked(text))
            for i, (text, fields) in enumerate(prompts)
        ]

    def _asked(self, text: str) -> dict[str, Any]:
        """The field with the messages of a prompt from which an episode begins. {} in a job without sessions."""
        if self.spec.sessions is None:
            return {}
        return {"messages": list(getattr(text, "messages", ())) or [{"role": "user", "content": text}]}


def prepare(
    spec: RLHFJobSpec,
    run_dir: Path,
    base_dir: Path,
    known: Mapping[str, Fingerprint] | None = None,
    hub: Hub | None = None,
) -> Prepared:
    """Create what is missing in the run directory, and load the data. Relative paths start from `base_dir`.

    `known` has the fingerprints of the data with which the run began. Other data is refused. `hub` downloads models by
    name and proves them. Writes `tokenizer/`, `models/actor-config/`, `proofs/` and `cache/`, each completely or not at
    all. Raises DataError, and OSError if the disk fails."""
    run_dir.mkdir(parents=True, exist_ok=True)
    hub = hub or Hub(spec.hub, run_dir)
    sources = model_sources(spec, base_dir, hub)
    hub.prove(lambda name: _trusts(spec, name))
    tokenizer_dir, config_dir = _tokenizer_dir(run_dir), run_dir / ACTOR_CONFIG

    def ready_for_rollouts(made: Callable[[], Any]) -> Any:
        """The tokenizer. Rollouts start as soon as it and the actor's configuration exist."""
        _once(tokenizer_dir, lambda folder: _save_tokenizer(made(), folder))
        tokenizer = tokenizers.load(tokenizer_dir, "spec.models.tokenizer", trust_remote_code=_trusts(spec, "actor"))
        actor = sources["actor"]
        if isinstance(actor, ScratchModel):
            config = scratch_config(actor, tokenizer, "spec.models.actor")
            _once(config_dir, lambda folder: _write_json(folder / "config.json", config))
        else:
            _fits(actor, tokenizer)
            _once(config_dir, lambda folder: _copy_config(actor, folder))
        return tokenizer

    # Data and weights may take an hour to download. Rollouts do not wait for them.
    training = spec.models.tokenizer.train
    given = None if training else given_tokenizer(spec, sources, base_dir, hub)
    tokenizer = None if training else ready_for_rollouts(lambda: given)
    chat = chat_format(given, _date_of(tokenizer_dir))
    data = collect(spec, base_dir, run_dir / "cache" / "datasets", chat, known)
    if training is not None:
        tokenizer = ready_for_rollouts(lambda: tokenizers.train(data.texts(), training.vocab_size))
    for name, source in sources.items():
        if name != "actor" and isinstance(source, ScratchModel):
            scratch_config(source, tokenizer, f"spec.models.{name}")
    teacher = sources.get("reference")
    if Stage.PPO in spec.stages and spec.ppo.advantage == "distillation" and isinstance(teacher, Path):
        _same_tokens(tokenizer, teacher, _trusts(spec, "reference"))
    hub.download_weights()
    for name, folder in sources.items():
        if isinstance(folder, Path) and getattr(spec.models, name).source.hugging_face is not None:
            check_weights(folder, f"spec.models.{name}.source.huggingFace")
    return Prepared(spec, run_dir, sources, tokenizer, data, chat)


def prompts_of_run(spec: RLHFJobSpec, run_dir: Path, known: Mapping[str, Fingerprint]) -> Prepared:
    """What a run was given, to read its prompts again. It loads no model, and changes nothing but the cache of data
    sets. Raises DataError if the data is not there any more, or is not that of the fingerprints in `known`."""
    tokenizer, chat = texts_of_run(spec, run_dir)
    data = collect(spec, run_dir, run_dir / "cache" / "datasets", chat, known)
    return Prepared(spec, run_dir, {}, tokenizer, data, chat)


def texts_of_run(spec: RLHFJobSpec, run_dir: Path) -> tuple[Any, ChatFormat]:
    """A run's tokenizer and chat format. Raises DataError."""
    folder = _tokenizer_dir(run_dir)
    tokenizer = tokenizers.load(folder, "spec.models.tokenizer", trust_remote_code=_trusts(spec, "actor"))
    # Without a tokenizer of its own, the run had none when it read the data.
    return tokenizer, chat_format(None if spec.models.tokenizer.train else tokenizer, _date_of(folder))


def own_model(
    spec: RLHFJobSpec, name: str, sources: Mapping[str, Path | ScratchModel], tokenizer_dir: Path
) -> ModelRef | None:
    """The initial weights of a model whose manifest names a source. None if the manifest does not."""
    source = sources.get(name)
    if source is None:
        return None
    model: TrainedModel = getattr(spec.models, name)
    return ModelRef(
        head="value" if name in ("critic", "reward") else "lm",
        path=str(source) if isinstance(source, Path) else None,
        scratch=source if isinstance(source, ScratchModel) else None,
        tokenizer=str(tokenizer_dir),
        seed=derived_seed("weights", spec.seed, name) % 2**31,
        trust_remote_code=model.trust_remote_code,
    )


def model_sources(spec: RLHFJobSpec, base_dir: Path, hub: Hub) -> dict[str, Path | ScratchModel]:
    """The source of each model for which the manifest names one. It is a local folder, or a configuration for random
    weights.

    The weights of hub repositories are not downloaded yet. Relative paths start from `base_dir`. Raises DataError."""
    if spec.models.actor.source is None:
        raise DataError("spec.models.actor.source is missing: name a huggingFace repository, a path, or scratch")
    result: dict[str, Path | ScratchModel] = {}
    for name in MODEL_NAMES:
        model: TrainedModel = getattr(spec.models, name)
        source: ModelSource | None = model.source
        if source is None:
            continue
        if source.scratch is not None:
            result[name] = source.scratch
        else:
            folder = result[name] = resolve(source, name, base_dir, hub, model.trust_remote_code)
            if name == "reward" and Stage.REWARD not in spec.stages and not spec.models.reward.calls:
                check_scores(folder, f"spec.models.{name}.source")
    for name in TRAINED:
        lora, first = getattr(spec.models, name).lora, owner(spec, name)
        if lora is not None and first is not None:
            _check_targets(lora, result[first], f"spec.models.{name}.lora.targetModules")
    return result


def _check_targets(lora: LoRA, source: Path | ScratchModel, field: str) -> None:
    """Raises DataError if the model has no layer of a name in `targetModules`."""
    config = model_config(source) if isinstance(source, Path) else {"model_type": source.architecture, **source.config}
    family = family_of(config) if isinstance(config, dict) else None
    if family is not None and (why := target_problem(lora.target_modules, lora.dropout, family)) is not None:
        raise DataError(f"{field}: {why}")


def _trusts(spec: RLHFJobSpec, name: str) -> bool:
    model: TrainedModel = getattr(spec.models, name)
    return model.trust_remote_code


def given_tokenizer(spec: RLHFJobSpec, sources: dict[str, Path | ScratchModel], base_dir: Path, hub: Hub) -> Any:
    """The tokenizer that the manifest names, or else the actor's own. Its chat template has the job's options. Raises
    DataError."""
    found = _found_tokenizer(spec, sources, base_dir, hub)
    if isinstance(actor := sources["actor"], Path):
        found.reply_ends = tokenizers.reply_ends(actor, found)
    return tokenizers.with_template_options(found, spec.data.chat_template_kwargs)


def _found_tokenizer(spec: RLHFJobSpec, sources: dict[str, Path | ScratchModel], base_dir: Path, hub: Hub) -> Any:
    named = spec.models.tokenizer.path
    trust = _trusts(spec, "actor")
    if named is not None:
        folder, field = base_dir / named, "spec.models.tokenizer.path"
        if not folder.exists() and hub_problem(named, "folder, and no model", base_dir, owner=False) is None:
            folder = hub.describe("tokenizer", field, named, None, trust)
        return tokenizers.load(folder, field, trust_remote_code=trust)
    actor = sources["actor"]
    if isinstance(actor, ScratchModel):
        raise DataError("spec.models.tokenizer: a model from scratch has no tokenizer of its own; set train or path")
    return tokenizers.load(actor, "spec.models.actor.source", trust_remote_code=trust)


# The day on which the run was prepared, in its copy of the tokenizer. A chat template that writes the date always
# writes this one in the run. In other programs the exported template writes the day of the request, as it did before.
_DATE = "prepared.txt"


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(str(folder))
    (folder / _DATE).write_text(datetime.now().isoformat() + "\n")


def _tokenizer_dir(run_dir: Path) -> Path:
    return run_dir / "tokenizer"


def _date_of(tokenizer_dir: Path) -> datetime | None:
    try:
        return datetime.fromisoformat((tokenizer_dir / _DATE).read_text().strip())
    except (OSError, ValueError):
        return None


def _fits(model: Path, tokenizer: Any) -> None:
    """Raises DataError if the tokenizer has ids that the model's embedding lacks."""
    config = model_config(model)
    size = config.get("vocab_size") if isinstance(config, dict) else None
    if isinstance(size, int) and size < len(tokenizer):
        raise DataError(
            f"spec.models.tokenizer: its {len(tokenizer)} tokens do not fit the actor's vocabulary of {size} ({model})"
            "; resize the model's embeddings (resize_token_embeddings), or take a tokenizer without the added tokens"
        )


def _same_tokens(tokenizer: Any, teacher: Path, trust_remote_code: bool) -> None:
    """Raises DataError if the teacher's tokenizer has other tokens than the actor's. A teacher's folder without a
    tokenizer is assumed to use the actor's."""
    if not (teacher / "tokenizer_config.json").is_file():
        return
    field = "spec.models.reference.source"
    own = tokenizers.load(teacher, field, trust_remote_code=trust_remote_code).get_vocab()
    known = tokenizer.get_vocab()
    other = sorted(token for token in own.keys() | known.keys() if own.get(token) != known.get(token))
    if other:
        raise DataError(
            f"{field}: the teacher's tokenizer differs from the actor's in {len(other)} tokens, such as {other[0]!r}, "
            "but distillation compares probabilities of the same tokens; take a teacher with the actor's tokenizer"
        )


def _copy_config(model: Path, folder: Path) -> None:
    _write_json(folder / "config.json", model_config(model))
    if (model / "generation_config.json").is_file():
        shutil.copy(model / "generation_config.json", folder)
    for code in model.glob("*.py"):
        shutil.copy(code, folder / code.name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _once(folder: Path, make: Callable[[Path], object]) -> None:
    """Fill a folder with `make` unless it exists. A crash, or another process that does the same, never leaves it
    incomplete."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        make(temporary)
        # Tokenizers with several chat templates have a folder of them.
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        try:
            temporary.rename(folder)
            sync(folder.parent)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _have(data: StageData[Any] | None, name: str) -> StageData[Any]:
    if data is None:
        raise ValueError(f"this job has no {name}")
    return data
