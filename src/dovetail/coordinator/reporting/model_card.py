"""Makes README.md of a trained model. It says what the model is, how it was trained, and how to use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import yaml

from dovetail.coordinator.reporting.summary_rows import get, rows
from dovetail.manifest.types import API_VERSION, KIND, DataSource, RLHFJobSpec, Stage

LANGUAGE_MODELS = ("sft", "actor", "actor-best", "actor-ema")
_WHAT = {
    "sft": "the actor after supervised fine-tuning",
    "reward": "the reward model",
    "actor": "the actor at the end of training",
    "actor-best": "the actor with the best evaluation",
    "actor-ema": "the moving average of the actor's weights",
    "critic": "the critic",
}
# These fields say how a model was trained. The card leaves out the fields that only a cluster needs to run the job.
_SHOWN = (
    *("seed", "stages", "models", "data", "sft", "reward", "dpo", "ppo", "generation", "evaluation", "groups", "plan"),
    "trainer",
)
_HIDDEN_OF_GROUPS = ("image", "podTemplate", "vllmArgs")
_PLACES = ("path", "pvc", "importPath", "code")


@dataclass(frozen=True)
class ListSize:
    """A source of one of the job's lists, and the numbers of its records that were trained on and held out."""

    list: str
    source: str
    train: int
    held_out: int


@dataclass(frozen=True)
class CardFacts:
    """The facts that the cards of a run's models show. `summary` is the content of summary.json."""

    job: str
    spec: RLHFJobSpec
    summary: Mapping[str, Any]
    sizes: list[ListSize] = field(default_factory=list)


def source_name(source: DataSource) -> str:
    """A data source in a few words, without folders of the machine."""
    if source.hugging_face is not None:
        subset = f", {source.subset}" if source.subset else ""
        return f"{source.hugging_face}{subset} ({source.split})"
    if source.synthetic is not None:
        return "generated records"
    return PurePath(source.path or source.pvc or "").name


def model_card(facts: CardFacts, name: str, step: int | None, own_template: bool, bias: float = 0.0) -> str:
    """README.md of the model `name`, as Markdown with the metadata that hubs read. `step` is the step after which it
    was exported, if that is known. `own_template` says whether its chat template came with the tokenizer. `bias` is the
    `score_bias` in its config.json."""
    return "\n".join(
        [*_metadata(facts, name), *_about(facts, name, step), *_use(name, own_template, bias), *_how(facts)]
    )


def _metadata(facts: CardFacts, name: str) -> Iterator[str]:
    spec, language = facts.spec, name in LANGUAGE_MODELS
    source = spec.models.actor.source
    lists = (spec.data.demonstrations, spec.data.preferences, spec.data.prompts)
    sets = dict.fromkeys(each.hugging_face for every in lists for each in every if each.hugging_face)
    document: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation" if language else "text-classification",
        "tags": ["dovetail", "rlhf"],
    }
    if source is not None and source.hugging_face is not None:
        document["base_model"] = source.hugging_face
    if sets:
        document["datasets"] = list(sets)
    yield from ("---", yaml.safe_dump(document, sort_keys=False).rstrip(), "---", "")


def _about(facts: CardFacts, name: str, step: int | None) -> Iterator[str]:
    found = rows(facts.summary)
    yield f"# {facts.job}: {name}"
    yield ""
    when = f" It was exported after step {step} of its stage." if step else ""
    spec = facts.spec
    words = {
        Stage.SFT: "supervised fine-tuning",
        Stage.REWARD: "a reward model",
        Stage.DPO: spec.dpo.loss,
        Stage.PPO: spec.ppo.method,
    }
    later = {"sft": (Stage.REWARD, Stage.DPO, Stage.PPO), "reward": (Stage.DPO, Stage.PPO)}.get(name, ())
    trained = ", ".join(words[stage] for stage in spec.stages if stage not in later)
    yield f"This is {_WHAT.get(name, name)} of the job `{facts.job}`, trained with Dovetail ({trained}).{when}"
    yield ""
    if found:
        yield from ("## Results", "", "| | before / first | after / last |", "|---|---|---|")
        yield from (f"| {what} | {before} | {after} |" for what, before, after in found)
        yield ""


def _use(name: str, own_template: bool, bias: float) -> Iterator[str]:
    if name not in LANGUAGE_MODELS:
        yield from ("## Use", "", "The model has one output: the score of a text.")
        if bias:
            yield f"Dovetail adds {bias:.6g} to it (`score_bias` in config.json). transformers does not."
        yield from ("", "```python")
        yield from ("from transformers import AutoModelForSequenceClassification", "")
        yield from ('model = AutoModelForSequenceClassification.from_pretrained("FOLDER_OR_REPOSITORY")', "```", "")
        return
    yield from ("## Use", "", "As an OpenAI-compatible server, with vLLM:", "", "```")
    yield from ("vllm serve FOLDER_OR_REPOSITORY", "```", "", "In Python:", "", "```python")
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    yield ""
    yield 'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_REPOSITORY")'
    yield 'model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_REPOSITORY")'
    yield 'messages = [{"role": "user", "content": "Hello!"}]'
    yield "inputs = tokenizer.apply_chat_template("
    yield '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True'
    yield ")"
    yield "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))"
    yield "```"
    yield ""
    yield "`generation_config.json` has the sampling settings of the training."
    if not own_template:
        yield (
            "The tokenizer has no chat template of its own. The one here writes dialogues as the training read them: "
            "`\\n\\nHuman: ... \\n\\nAssistant: ...`."
        )
    yield ""


def _how(facts: CardFacts) -> Iterator[str]:
    yield from ("## Training", "")
    if facts.sizes:
        yield from ("| data | source | records trained on | held out |", "|---|---|---|---|")
        yield from (f"| {s.list} | {s.source} | {s.train} | {s.held_out} |" for s in facts.sizes)
        yield ""
    versions = get(facts.summary, "versions") or {}
    if versions:
        yield "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
        yield ""
    yield "The manifest, without the fields that have their default and without folders of the machine:"
    yield from (
        "",
        "```yaml",
        yaml.safe_dump(shown_manifest(facts.job, facts.spec), sort_keys=False).rstrip(),
        "```",
        "",
    )


def shown_manifest(job: str, spec: RLHFJobSpec) -> dict[str, Any]:
    """The manifest as a card shows it, with the fields that decide the training."""
    document = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    shown = {name: _without_places(document[name]) for name in _SHOWN if name in document}
    for group in shown.get("groups", []):
        for name in _HIDDEN_OF_GROUPS:
            group.pop(name, None)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": job}, "spec": shown}


def _without_places(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: PurePath(inner).name if key in _PLACES and isinstance(inner, str) else _without_places(inner)
            for key, inner in value.items()
        }
    return [_without_places(inner) for inner in value] if isinstance(value, list) else value
