"""Checks that the files that a manifest names exist and can be used. Only this part of validation reads the disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.manifest.checks.batching import pinned_layouts
from dovetail.manifest.checks.hub_names import hub_problem
from dovetail.manifest.checks.model_contents import folder_problems, model_config, tokenizer_problem
from dovetail.manifest.checks.scratch import SIZES, cpu_head_error, is_count
from dovetail.manifest.fixed_names import DATA_ENDINGS, data_files
from dovetail.manifest.model_families.support import family_of, replay_error, served_problem, target_problem
from dovetail.manifest.model_shape import ModelShape, ShapeError
from dovetail.manifest.sizes import TRAINED, draws_on_cpus, owner
from dovetail.manifest.types import ModelSource, RLHFJobSpec, Stage

# The folder that the user gave or None, the field for it, and the named functions with their fields.
_Place = tuple[str | None, str, list[tuple[str, str]]]


def missing_modules(spec: RLHFJobSpec, base: Path, here: bool) -> Iterator[str]:
    """A sentence for each function whose module is neither in its folder nor on Python's path. `base` is the manifest's
    folder. `here` says whether the job runs on this machine. If not, only folders that the manifest names are searched,
    because a pod's image may have more."""
    for folder, field, functions in _places(spec):
        if (folder is None and not here) or (folder is not None and not (base / folder).is_dir()):
            continue
        searched = base / (folder or "")
        for place, name in functions:
            module = name.partition(":")[0]
            if not _in_folder(module, searched) and not _importable(module):
                yield (
                    f"{place}: there is no module {module!r} in {searched.resolve()} or on PYTHONPATH; correct the "
                    f"name, or name the module's folder in {field}."
                )


def _places(spec: RLHFJobSpec) -> Iterator[_Place]:
    """The folders and their functions, for the functions that the job calls on this machine."""
    if Stage.PPO not in spec.stages:
        return
    reward, ppo = spec.models.reward, spec.ppo
    single = reward.functions is None
    field = "spec.models.reward.function"
    called = [(field if single else f"{field}s[{i}].function", c.function) for i, c in enumerate(reward.calls)]
    metrics = spec.evaluation.metrics
    called += [(f"spec.evaluation.metrics[{metrics.index(name)}]", name) for name in spec.evaluation.functions]
    environment = None if spec.sessions is None else spec.sessions.environment
    if environment is not None and environment.function is not None:
        called.append(("spec.sessions.environment.function", environment.function))
    if reward.code is None:
        yield reward.import_path, "spec.models.reward.importPath", called
    own = [("spec.ppo.advantageFunction", ppo.advantage_function), ("spec.ppo.loss", ppo.loss)]
    yield ppo.import_path, "spec.ppo.importPath", [(place, name) for place, name in own if name and ":" in name]


def _in_folder(module: str, folder: Path) -> bool:
    path = folder.joinpath(*module.split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return any(file.is_file() for file in files) or any(path.parent.glob(f"{path.name}.*so"))


def _importable(module: str) -> bool:
    """Whether the installation has the module's outermost package. What is in it is not looked at, because Python would
    import the package for that."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):  # the module is loaded, but does not say from where
        return True


def check_files(spec: RLHFJobSpec, base_dir: Path, here: bool = False) -> list[str]:
    """One sentence for each local file or folder that is missing, empty or unusable, and for each function whose module
    is missing. Relative paths start at `base_dir`. `here` says whether the job runs on this machine. It reads names,
    sizes and model configurations, but no data, and imports nothing."""
    checks = (_data, _models, _heads, _served, _experts, _shared_layers, _adapters, _tokenizer)
    found = [sentence for check in checks for sentence in check(spec, base_dir)]
    if here and spec.sessions is not None and spec.sessions.sandbox == "Pod":
        found.append(
            "spec.sessions.sandbox is Pod, and one machine has no pods; write Bubblewrap, or None to go without a "
            "sandbox."
        )
    return list(dict.fromkeys([*found, *missing_modules(spec, base_dir, here)]))


def layer_counts(spec: RLHFJobSpec, base_dir: Path) -> dict[str, int]:
    """The numbers of layers of actor, critic and reward model, if the manifest's own folders and configurations give
    them.

    A critic without a source is made from the reward model, or from the actor. A reward model without a source is made
    from the actor."""
    own = {name: _layers(getattr(spec.models, name).source, base_dir) for name in TRAINED}
    found = {}
    for name in TRAINED:
        first = owner(spec, name)
        if first is not None and (count := own[first]) is not None:
            found[name] = count
    return found


def model_configs(spec: RLHFJobSpec, base_dir: Path) -> dict[str, dict[str, Any]]:
    """config.json of each model that names a folder, if it can be read."""
    found = {}
    for name in ("actor", "critic", "reward", "reference"):
        source: ModelSource | None = getattr(spec.models, name).source
        if source is not None and source.path is not None:
            config = model_config(base_dir / source.path)
            if isinstance(config, dict):
                found[name] = config
    return found


def _config(source: ModelSource | None, base: Path) -> dict[str, Any]:
    """A model's configuration. It is empty if the manifest's own folders and fields do not say it."""
    if source is not None and source.scratch is not None:
        return {"model_type": source.scratch.architecture, **source.scratch.config}
    found = None if source is None or source.path is None else model_config(base / source.path)
    return found if isinstance(found, dict) else {}


def _layers(source: ModelSource | None, base: Path) -> int | None:
    count = _config(source, base).get("num_hidden_layers")
    return count if isinstance(count, int) else None


def _data(spec: RLHFJobSpec, base: Path) -> Iterator[str]:
    needed = {
        "demonstrations": Stage.SFT in spec.stages or spec.ppo.ptx_coef > 0,
        "preferences": Stage.DPO in spec.stages or (Stage.REWARD in spec.stages and not spec.models.reward.calls),
        "prompts": Stage.PPO in spec.stages,
    }
    for name, wanted in needed.items():
        for index, source in enumerate(getattr(spec.data, name)):
            if wanted and source.path is not None:
                yield from _data_path(f"spec.data.{name}[{index}].path", base / source.path)
    for index, source in enumerate(spec.evaluation.prompts):
        if Stage.PPO in spec.stages and source.path is not None:
            yield from _data_path(f"spec.evaluation.prompts[{index}].path", base / source.path)


def _data_path(field: str, path: Path) -> Iterator[str]:
    if not path.exists():
        yield f"{field}: {path} does not exist; {_variable(path) or _CORRECT}."
        return
    files = data_files(path)
    if not files and path.is_dir():
        yield f"{field}: the folder {path} holds no data file; put {DATA_ENDINGS} files into it."
    elif not files:
        yield f"{field}: {path} must end in {DATA_ENDINGS}; convert it, for example to a .jsonl file."
    for file in files:
        yield from _not_empty(field, file)


_CORRECT = "correct the path (relative paths start at the manifest's folder)"


def _variable(path: Path) -> str:
    """Advice about an environment variable in a path. "" if there is none."""
    return "write the path itself, because no environment variables are replaced in a manifest" * ("$" in str(path))


def _not_empty(field: str, path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            if not file.read(1):
                yield f"{field}: {path} is empty; give a file with records or remove the source."
    except OSError as error:
        yield f"{field}: cannot read {path}: {(error.strerror or str(error)).lower()}."


def _models(spec: RLHFJobSpec, base: Path) -> Iterator[str]:
    for name in ("actor", "critic", "reward", "reference"):
        source: ModelSource | None = getattr(spec.models, name).source
        if source is not None and source.path is not None:
            yield from _model_folder(f"spec.models.{name}.source.path", base / source.path)
    for field, code, used in (
        (
            "spec.models.reward.importPath",
            spec.models.reward.import_path,
            bool(spec.models.reward.calls) or bool(spec.evaluation.functions),
        ),
        ("spec.ppo.importPath", spec.ppo.import_path, spec.ppo.names_functions),
    ):
        if code is not None and used and not (base / code).is_dir():
            yield f"{field}: {base / code} is no folder; name the one that holds the module."


def _trained_config(spec: RLHFJobSpec, name: str, base: Path) -> dict[str, Any]:
    """The configuration of a trained model, as `_config`."""
    first = owner(spec, name)
    return _config(None if first is None else getattr(spec.models, first).source, base)


def _heads(spec: RLHFJobSpec, base: Path) -> Iterator[str]:
    """Problems with attention heads that vLLM does not compute on CPUs. (A model from scratch has a rule about
    them.)"""
    source = spec.models.actor.source
    if Stage.PPO not in spec.stages or not draws_on_cpus(spec) or source is None or source.path is None:
        return
    config = _config(source, base)
    known = bool(config) and all(is_count(config.get(size, 1)) for size in SIZES)
    if known and (error := cpu_head_error(config)) is not None:
        yield f"spec.models.actor.source.path: {error}; take another model, or rollouts on GPUs."


def _served(spec: RLHFJobSpec, base: Path) -> Iterator[str]:
    """Fields that vLLM's class needs and the actor's configuration does not have, and arguments that do not go with
    the model."""
    source = spec.models.actor.source
    config = _config(source, base)
    family = family_of(config)
    if Stage.PPO not in spec.stages or source is None or family is None:
        return
    if lacking := [name for name in family.served if config.get(name) is None]:
        field = "path" if source.scratch is None else "scratch.config"
        yield (
            f"spec.models.actor.source.{field}: vLLM needs {' and '.join(lacking)} in the config.json of {family.name} "
            "models; set what the published models have."
        )
    for i, group in enumerate(spec.groups):
        if (problem := served_problem(config, group.vllm_args)) is not None:
            yield f"spec.groups[{i}].vllmArgs: {problem}."


def _experts(spec: RLHFJobSpec, base: Path) -> Iterator[str]:
    """Problems with settings for models with experts, in jobs whose model has none."""
    for name in TRAINED:
        family = family_of(_trained_config(spec, name, base))
        if getattr(spec.models, name).router_aux_loss_coef and family is not None and not family.softmax_routers:
            yield (
                f"spec.models.{name}.routerAuxLossCoef is for models with routers like Qwen3-MoE's in all layers, and "
                f"{family.name} models have none; remove it."
            )
    if Stage.PPO in spec.stages and spec.ppo.routing_replay:
        error = replay_error(_config(spec.models.actor.source, base))
        if error is not None:
            yield error


def _shared_layers(spec: RLHFJobSpec, base: Path) -> Iterator[str]:
    """Problems with pinned degrees of models whose layers, tokens or experts ranks cannot share."""
    pinned = pinned_layouts(spec) or {}
    for name in ("actor", "critic"):
        config = _trained_config(spec, name, base)
        family = family_of(config)
        if name not in pinned or family is None:
            continue
        field, layout = pinned[name]
        if layout.cp > 1 and not family.packs:
            yield f"{field}.cp: layers of {family.name} models need whole sequences; set it to 1."
        if layout.tp > 1 and not family.splits:
            yield f"{field}.tp: {layout.tp} ranks cannot share layers of {family.name} models; set it to 1."
        with suppress(ShapeError):  # told elsewhere
            if (why := ModelShape.of(config).deal_problem(layout.ep)) is not None:
                yield f"{field}.ep is {layout.ep}, {why}."


def _model_folder(field: str, path: Path) -> Iterator[str]:
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        yield f"{field}: {path} {what}; {_variable(path) or 'give a folder in Hugging Face format'}."
        return
    yield from (f"{field}: {why}." for why in folder_problems(path))


def _adapters(spec: RLHFJobSpec, base: Path) -> Iterator[str]:
    for name in TRAINED:
        lora = getattr(spec.models, name).lora
        family = family_of(_trained_config(spec, name, base))
        if lora is None or family is None:
            continue
        if (why := target_problem(lora.target_modules, lora.dropout, family)) is not None:
            yield f"spec.models.{name}.lora.targetModules: {why}."


def _tokenizer(spec: RLHFJobSpec, base: Path) -> Iterator[str]:
    given, actor = spec.models.tokenizer.path, spec.models.actor.source
    if given is None:
        own = base / actor.path if actor is not None and actor.path is not None else None
        asked = spec.models.tokenizer.train is None and spec.models.tokenizer.pvc is None
        if asked and own is not None and own.is_dir() and (why := tokenizer_problem(own)) is not None:
            yield f"spec.models.actor.source.path: {why}."
        return
    path, field = base / given, "spec.models.tokenizer.path"
    if path.is_dir():
        if (why := tokenizer_problem(path)) is not None:
            yield f"{field}: {why}."
    elif path.exists():
        yield f"{field}: {path} is a file; give the folder that it is in."
    elif hub_problem(given, "folder, and no model", base, owner=False) is not None or given.startswith((".", "~")):
        yield f"{field}: {path} does not exist; give a folder, or a hub name such as owner/name."
