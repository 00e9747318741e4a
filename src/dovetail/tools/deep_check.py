"""The checks of `dovetail validate --deep`. They read every line of the data, load the tokenizer, call the user's
functions, count the GPUs and prove the models on small copies. They load no weights. They download only the small files
of a hub's model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.collection import needed
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.coordinator.data.prepare import Prepared, given_tokenizer, model_sources, prepare
from dovetail.coordinator.data.records import equal_pairs
from dovetail.coordinator.data.sources import with_system
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.coordinator.data.text.chat_template import Message, NotWritten, TemplateRefused, chat_format
from dovetail.coordinator.data.text.tokenize import Encoder
from dovetail.coordinator.reporting.sample_texts import printable
from dovetail.coordinator.rewards.calls import Calls, RewardError, rehearse
from dovetail.coordinator.rewards.workers import Workers
from dovetail.coordinator.samples.evaluation_metrics import EvaluationMetrics
from dovetail.coordinator.sessions.answer_reader import written_turn
from dovetail.coordinator.sessions.effects import EpisodeLost, Failed
from dovetail.coordinator.sessions.http_environment import HttpEnvironment
from dovetail.coordinator.sessions.job_sessions import Places, job_environment, job_player
from dovetail.coordinator.sessions.play import AskedTurn, Ending, SampledTurn, check_opening
from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.store.store import Store
from dovetail.gpus.nvidia_driver import Device, driver_devices
from dovetail.launch.processes import gpu_slots
from dovetail.manifest.checks.model_contents import model_config
from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.types import DataSource, RLHFJob, RLHFJobSpec, ScratchModel, Stage
from dovetail.protocol.plan import Plan
from dovetail.tools.data_look import DataLook, look, look_at_hub
from dovetail.tools.doctor.finding import Finding
from dovetail.tools.one_line import product_label

# A larger share of records that are cut, or of pairs with equal replies, is probably a mistake.
CUT_SHARE = 0.05
EQUAL_SHARE = 0.01
SHOWN = 300  # characters of a text


class _SmallFiles(Hub):
    """A hub from which only the small files are downloaded. Models are proved elsewhere (`_proved`)."""

    def prove(self, trusted: Callable[[str], bool]) -> None:
        return None

    def download_weights(self) -> None:
        return None


def check_deeply(job: RLHFJob, plan: Plan, folder: Path, scratch: Path) -> Iterator[Finding]:
    """Yields each finding as soon as it is known. A sentence about a field begins with the field. `job` has absolute
    paths. `folder`: the place of the user's functions. `scratch`: an empty folder to write to."""
    spec = job.spec
    yield gpus_found(job, plan, driver_devices())
    if remote := _on_claims(spec):
        yield Finding("claims", "skipped", f"{remote[0]} is on a volume of a cluster, so data and models are not read")
        return
    hub = _SmallFiles(spec.hub, scratch)
    try:
        sources = model_sources(spec, folder, hub)
        given = None if spec.models.tokenizer.train else given_tokenizer(spec, sources, folder, hub)
    except DataError as error:
        yield Finding("tokenizer", "problem", str(error))
        return
    yield from _proved(sources, scratch / "proofs")
    if given is not None:
        yield _tokenizer_found(given)
        actor = sources["actor"]
        if isinstance(actor, Path) and (too_long := _context(spec, actor)) is not None:
            yield too_long
    encoder = None if given is None else _encoder(given, spec)
    good = True
    for kind, field, source in _sources(spec):
        if source.synthetic is not None:
            continue
        found = _data_found(kind, field, source, folder, scratch / "cache" / "datasets", encoder, given)
        good = good and found.state != "problem"
        yield found
    if not good:
        return
    try:
        prepared = prepare(spec, scratch, folder, hub=hub)
        yield from _whole(prepared, given)
    except DataError as error:
        yield Finding("data", "problem", str(error))
        return
    if Stage.PPO in spec.stages:
        if spec.sessions is not None:
            yield asyncio.run(_episode(spec, prepared, folder, scratch))
        yield from _functions(spec, prepared, folder)


def _proved(sources: Mapping[str, Path | ScratchModel], scratch: Path) -> Iterator[Finding]:
    """Whether Dovetail computes a small copy of each model rightly. Models of equal configurations are proved once."""
    if find_spec("torch") is None:
        yield Finding("models", "skipped", "torch is not installed here, so no model was proved")
        return
    from dovetail.protocol.messages import ModelRef
    from dovetail.tools.model_check import prove_model

    done: list[Path | ScratchModel] = []
    for name, source in sources.items():
        if source in done:
            continue
        done.append(source)
        if isinstance(source, Path):
            ref = ModelRef(head="lm", path=str(source))
        else:
            made = {"vocab_size": 96, **source.config}
            ref = ModelRef(head="lm", scratch=source.model_copy(update={"config": made}))
        found = prove_model(ref, scratch / name)
        wrong = next((f for f in found if f.state in ("problem", "warning")), None)
        if wrong is not None:
            yield replace(wrong, check=name, says=f"spec.models.{name}.source: {wrong.says}")
        else:
            yield Finding(name, "ok", f"a small copy of its model is computed rightly ({len(found)} checks)")


def gpus_found(job: RLHFJob, plan: Plan, devices: Sequence[Device]) -> Finding:
    """Checks whether this machine has the GPUs of the plan. `devices`: this machine's GPUs."""
    slots = gpu_slots(job, plan)
    wanted = max((slot for each in slots.values() for slot in each), default=-1) + 1
    have = len(devices)
    if not wanted:
        return Finding("GPUs", "ok", "the plan uses no GPUs")
    products = sorted({g.gpu.product for g in job.spec.groups if not g.on_cpu and g.gpu.product is not None})
    says = f"the plan uses {wanted} GPU{'s' * (wanted > 1)} ({', '.join(products)}), and this machine has {have}"
    others = sorted(
        {device.name for device in devices} - {p for d in devices if product_label(p := d.name) in products}
    )
    if have < wanted:
        mend = "run the job on a cluster, or change spec.groups"
        mend += ", or give dovetail run --cpu" if not have else "; processes would share GPUs"
        return Finding("GPUs", "warning", says, mend)
    if others:
        return Finding("GPUs", "warning", f"{says}, of other products: {', '.join(others)}", "name them in spec.groups")
    return Finding("GPUs", "ok", says)


def _on_claims(spec: RLHFJobSpec) -> list[str]:
    """The fields that name a volume of a cluster."""
    found = []
    for name in ("actor", "critic", "reward", "reference"):
        source = getattr(spec.models, name).source
        if source is not None and source.pvc is not None:
            found.append(f"spec.models.{name}.source.pvc")
    if spec.models.tokenizer.pvc is not None:
        found.append("spec.models.tokenizer.pvc")
    return found + [f"{field}.pvc" for _, field, source in _sources(spec) if source.pvc is not None]


def _sources(spec: RLHFJobSpec) -> Iterator[tuple[DataKind, str, DataSource]]:
    kinds = needed(spec)
    for kind in kinds:
        for i, source in enumerate(getattr(spec.data, kind)):
            yield kind, f"spec.data.{kind}[{i}]", source
    for i, source in enumerate(spec.evaluation.prompts if "prompts" in kinds else ()):
        yield "prompts", f"spec.evaluation.prompts[{i}]", source


def _encoder(tokenizer: Any, spec: RLHFJobSpec) -> Encoder:
    return Encoder(tokenizer, spec.data.max_prompt_tokens, spec.data.max_tokens)


def _tokenizer_found(tokenizer: Any) -> Finding:
    template = "a chat template" if getattr(tokenizer, "chat_template", None) else "no chat template"
    return Finding("tokenizer", "ok", f"{len(tokenizer):,} tokens, {template}, ends with {tokenizer.eos_token!r}")


def _context(spec: RLHFJobSpec, folder: Path) -> Finding | None:
    """Returns a problem if sequences may be longer than the model allows."""
    config = model_config(folder)
    limit = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if not isinstance(limit, int):
        return None
    wanted = []
    if Stage.PPO in spec.stages:
        longest = spec.data.max_prompt_tokens + spec.generation.max_tokens
        wanted.append(("spec.data.maxPromptTokens + spec.generation.maxTokens", longest))
    if {Stage.SFT, Stage.REWARD, Stage.DPO} & set(spec.stages):
        wanted.append(("spec.data.maxTokens", spec.data.max_tokens))
    for field, tokens in wanted:
        if tokens > limit:
            says = (
                f"{field} is {tokens}, but the model takes {limit} tokens (max_position_embeddings of its config.json)"
            )
            return Finding("lengths", "problem", says, "lower it")
    return None


def _data_found(
    kind: DataKind, field: str, source: DataSource, folder: Path, cache: Path, encoder: Encoder | None, tokenizer: Any
) -> Finding:
    """Check one data set. `cache`: the folder in which `prepare` looks for a hub's data sets, so that each is
    downloaded once."""
    name = field.removeprefix("spec.")
    chat = with_system(chat_format(tokenizer), source)
    try:
        if source.path is None:
            described = look_at_hub(source, field, kind, encoder, chat, cache)
        else:
            described = look(folder / source.path, field, kind, source.format, encoder, chat, source.template)
    except DataError as error:
        return Finding(name, "problem", str(error))
    if described.first_error is not None:
        more = f"; {described.errors - 1:,} more of its records are bad" if described.errors > 1 else ""
        return Finding(name, "problem", described.first_error + more)
    if described.tools and not chat.shows_tools:
        says = (
            f"{described.tools:,} of {described.records:,} records have tools, but the chat template shows none of them"
        )
        return Finding(name, "warning", says, "take a tokenizer whose template does, or leave the tools out")
    return _described(name, described)


def _described(name: str, dataset: DataLook) -> Finding:
    lengths = [f"{row.part}: median {row.median:,}, longest {row.longest:,} tokens" for row in dataset.lengths]
    odd = [clause for clause in (dataset.empty, dataset.repeated) if clause]
    says = "; ".join([f"{dataset.records:,} records, {dataset.format}", *lengths, *odd])
    if dataset.equal:
        says += f"; {equal_pairs(dataset.equal, f'the {dataset.records:,} pairs')}"
        if dataset.equal > EQUAL_SHARE * dataset.records:
            return Finding(name, "warning", says, "leave them out, or raise spec.data.maxTokens if they are cut")
    if dataset.empty:
        return Finding(name, "warning", says, "leave them out, or the model learns to say nothing")
    cut = [row for row in dataset.lengths if row.cut > CUT_SHARE * dataset.records]
    if cut:
        row = cut[0]
        field = "spec.data.maxPromptTokens" if row.part == "prompt" else "spec.data.maxTokens"
        says += f"; {row.cut:,} are cut at {row.limit:,} ({row.part})"
        return Finding(name, "warning", says, f"raise {field}, or leave long records out")
    return Finding(name, "ok", says)


def _whole(prepared: Prepared, given: Any) -> Iterator[Finding]:
    """Describes the lists of records as a run would use them. Raises DataError."""
    if given is None:
        tokenizer = tokenizers.load(prepared.tokenizer_dir, "spec.models.tokenizer")
        yield Finding("tokenizer", "ok", f"{len(tokenizer):,} tokens, trained on the job's records")
    for kind, prompt, learnt in prepared.first_texts():
        listed = getattr(prepared.data, kind)
        held = sum(len(part.held_out) for part in listed.parts)
        shown = f"{prompt[-SHOWN:]!r}" + (f", then {learnt[:SHOWN]!r}" if learnt else "")
        yield Finding(kind, "ok", f"{len(listed):,} to train on, {held:,} held out; the first: {printable(shown)}")


async def _episode(spec: RLHFJobSpec, prepared: Prepared, folder: Path, scratch: Path) -> Finding:
    """Play an episode of the first prompt, in which the model calls the first tool once and then says a word. A server
    is asked for its tools only, and a service must only answer, because what they do may have effects."""
    environment = job_environment(spec, Places(folder, scratch), "validate", lambda *_, **__: None)
    sessions = spec.sessions
    assert environment is not None
    assert sessions is not None
    whose = "environment" if sessions.agent is None else "agent"
    store = Store(scratch / "episode")
    turns = count()
    try:
        await environment.open()
        if isinstance(environment, HttpEnvironment):
            names = ", ".join(tool["function"]["name"] for tool in environment.tools)
            return Finding(whose, "ok", f"{environment.url} has the tools {names}")
        if sessions.agent is not None and sessions.agent.url is not None:
            return Finding(whose, "ok", f"{sessions.agent.url} answers; only a run asks it for episodes")
        fields = dict(prepared.prompts(1)[0].fields)

        async def scripted(turn: AskedTurn) -> SampledTurn:
            check_opening(turn, spec.data.max_prompt_tokens)
            said: Message = {"role": "assistant", "content": "Done"}
            if next(turns) == 0 and turn.exchange.tools:
                call = {"id": "call00000", "type": "function", "function": _plausible(turn.exchange.tools[0])}
                said = {"role": "assistant", "content": "", "tool_calls": [call]}
            text = written_turn(prepared.chat, said)
            ids = prepared.tokenizer(text, add_special_tokens=False)["input_ids"]
            return SampledTurn(ids, [0.0] * len(ids), True)

        player, asked = job_player(sessions, prepared, environment, store.tool_calls), fields.pop("messages")
        begun: Any = await environment.begin("1-0-0-0", asked, fields)
        played = await player.play(Key(1, 0, 0), 0, asked, begun, scripted)
        await begun.end()
    except (ValueError, Failed, EpisodeLost, NotWritten, TemplateRefused) as error:
        text = str(error)
        return Finding(whose, "problem", text if text.startswith("spec.") else f"spec.sessions: {text}")
    finally:
        store.close()
        await environment.close()
    shown = printable(" | ".join(f"{m['role']}: {_shown(m)}" for m in played.messages)[: 3 * SHOWN])
    earned = "" if played.reward is None else f"; it earned {played.reward:g}"
    if played.ending is Ending.WRONG_CALL:
        says = f"a call that the chat template writes is not read back ({played.ending}: {played.why}); {shown}"
        return Finding(whose, "problem", f"spec.sessions: {says}")
    branches = (
        "" if len(played.branches) == 1 else f"; {len(played.branches)} sequences, as the template rewrites turns"
    )
    return Finding(whose, "ok", f"an episode with a scripted model{earned}{branches}: {shown}")


def _shown(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    written = [f"{call['name']}({json.dumps(call['arguments'])})" for call in calls]
    return " ".join(filter(None, [str(message["content"]), *written]))


def _plausible(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool with values of the right types."""
    values: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    parameters = tool["function"]["parameters"]
    kinds = {name: parameters["properties"][name] for name in parameters.get("required", ())}
    given = {name: kind.get("enum", [values.get(kind.get("type"), "a")])[0] for name, kind in kinds.items()}
    return {"name": tool["function"]["name"], "arguments": given}


def _functions(spec: RLHFJobSpec, prepared: Prepared, folder: Path) -> Iterator[Finding]:
    """Call the user's functions on two prompts. They run in processes of their own, as in a run."""

    async def rewards() -> list[str]:
        calls = Calls(Workers(spec.models.reward, folder), 0, lambda *_, **__: None)
        try:
            await rehearse(calls, prepared)
            return [function.title for function in calls.functions]
        finally:
            await calls.close()

    async def metrics() -> None:
        checked = EvaluationMetrics(spec, folder, lambda *_, **__: None)
        try:
            await checked.check(prepared.evaluation_prompts())
        finally:
            await checked.close()

    if spec.models.reward.calls:
        try:
            titles = asyncio.run(rewards())
            yield Finding("reward functions", "ok", f"{', '.join(titles)} gave finite numbers for two prompts")
        except RewardError as error:
            yield Finding("reward functions", "problem", str(error))
    try:
        asyncio.run(metrics())
    except (RewardError, DataError) as error:
        yield Finding("evaluation metrics", "problem", str(error))
