"""`dovetail profile`: measures a job's models on this machine, for the schedule chooser and the planner."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.table import Table

from dovetail.manifest.model_shape import Head
from dovetail.manifest.sizes import has_critic, shares_body
from dovetail.manifest.types import ModelSource, RLHFJob, RLHFJobSpec
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.files.machine_profile import Machine, ModelTimes, Profile
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.process.extras import Extra, require


@click.command()
@click.argument("manifest", metavar="JOB.yaml", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("profile.json"),
    help="Write the times to this file.  [default: profile.json]",
)
@click.option(
    "--micro-batch",
    "micro_batches",
    type=click.IntRange(1),
    multiple=True,
    help="Sequences of a micro-batch. May be given more than once.  [default: spec.ppo.microBatchSize and its half]",
)
@click.option("--tokens", type=click.IntRange(2), help="Length of a sequence.  [default: spec.data.maxTokens]")
@click.option(
    "--repeats", type=click.IntRange(1), default=7, show_default=True, help="Number of passes; the median counts."
)
@click.option("--no-link", is_flag=True, help="Do not measure messages between two processes.")
@click.option(
    "--iterations",
    is_flag=True,
    help="Also run four short jobs with these models on CPUs, to measure whole PPO iterations.",
)
@click.option(
    "--hardware",
    "hardware_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write this machine's FLOP/s and bandwidths to this file, for dovetail plan --hardware.",
)
def profile(
    manifest: Path,
    output: Path,
    micro_batches: tuple[int, ...],
    tokens: int | None,
    repeats: int,
    no_link: bool,
    iterations: bool,
    hardware_path: Path | None,
) -> None:
    """Measure the passes of a job's actor and critic on this machine.

    It measures the embedding, one layer and the head separately: the forward pass, the backward pass, both halves of
    the backward pass, and the memory of activations. It also measures messages between two processes. Weights are
    random; only the models' configurations are read.

    `dovetail run --profile` and `dovetail schedule --profile` read the file.

    With --iterations it takes some minutes more. Then `dovetail plan` can predict iterations on this machine, of this
    job and of others with the same models. It finds the file in the run directory:

    \b
      dovetail profile job.yaml --iterations -o runs/job/profile.json
    """
    from dovetail.manifest.checks.validation import load_manifest
    from dovetail.manifest.resolve import absolute_paths

    needed: list[Extra] = ["coordinator", "trainer"]
    require("dovetail profile", [*needed, "rollout-cpu"] if iterations else needed)
    base = manifest.resolve().parent
    job = absolute_paths(load_manifest(manifest), base)
    spec = job.spec
    sizes = sorted(set(micro_batches) or {spec.ppo.micro_batch_size, max(1, spec.ppo.micro_batch_size // 2)})
    console = Console()
    with console.status("measuring") as status:
        made = _measure(spec, base, sizes, tokens or spec.data.max_tokens, repeats, not no_link, status.update)
        if hardware_path is not None:
            status.update("measuring FLOP/s and bandwidths")
            _write(hardware_path, _hardware(made))
        if iterations:
            machine = _iterations(job, made.models["actor"].layers, status.update)
            made = made.model_copy(update={"machine": machine})
    _write(output, made.model_dump_json(by_alias=True, indent=2) + "\n")
    console.print(profile_table(made))
    for written in [output] + ([hardware_path] if hardware_path is not None else []):
        console.print(f"\nWritten: {written}", highlight=False, markup=False, soft_wrap=True)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error


def _iterations(job: RLHFJob, layers: int, show: Callable[[str], None]) -> Machine:
    from dovetail.manifest.types import Stage
    from dovetail.tools.calibrate import measure_machine

    if Stage.PPO not in job.spec.stages:
        raise UsageError("--iterations measures PPO iterations, but spec.stages has no ppo; leave it out.")
    if not all(group.on_cpu for group in job.spec.groups):
        raise UsageError("--iterations measures a machine whose groups all run on CPUs; leave it out.")
    with tempfile.TemporaryDirectory(prefix="dovetail-profile-") as folder:
        return measure_machine(job, layers, Path(folder), show)


def _hardware(made: Profile) -> str:
    import torch

    from dovetail.trainer.profile import hardware_toml

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return hardware_toml(device, made.link if torch.cuda.device_count() > 1 else None)


def _measure(
    spec: RLHFJobSpec,
    base: Path,
    sizes: Sequence[int],
    tokens: int,
    repeats: int,
    link: bool,
    show: Callable[[str], None],
) -> Profile:
    import torch

    from dovetail.manifest.types import Dtype
    from dovetail.models import ModelError
    from dovetail.trainer.engine.parallel import compute_dtype
    from dovetail.trainer.profile import measure_link, measure_model

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dtype = compute_dtype(Dtype.AUTO, device)
    models: dict[str, ModelTimes] = {}
    for name in ("actor", "critic"):
        if name == "critic" and not has_critic(spec):
            continue
        show(f"measuring the {name}")
        try:
            models[name] = measure_model(_reference(spec, name, base), sizes, tokens, device, dtype, repeats)
        except ModelError as error:
            raise UsageError(f"spec.models.{name}: {error}.") from error
    show("measuring messages")
    try:
        measured = measure_link(gpu and torch.cuda.device_count() > 1) if link else None
    except (TimeoutError, RuntimeError) as error:
        raise RunError(f"messages between two processes could not be measured: {error}") from error
    return Profile(
        device=torch.cuda.get_device_name(device) if gpu else "cpu",
        threads=torch.get_num_threads(),
        tokens=tokens,
        models=models,
        link=measured,
    )


def _reference(spec: RLHFJobSpec, name: str, base: Path) -> ModelRef:
    """The source of the configuration: the model's own source, or else the reward model's or the actor's."""
    from dovetail.coordinator.data.data_error import DataError
    from dovetail.coordinator.data.downloads.hub import Hub
    from dovetail.coordinator.data.downloads.model_folders import resolve

    sources = [spec.models.actor] if name == "actor" else [spec.models.critic, spec.models.reward, spec.models.actor]
    model = next(m for m in sources if m.source is not None)
    source = model.source
    assert isinstance(source, ModelSource)
    policy: Literal["lm", "lm+value"] = "lm+value" if shares_body(spec) else "lm"
    head: Head = "value" if name == "critic" else policy
    if source.scratch is None:
        try:
            hub = Hub(spec.hub)
            folder = resolve(source, name, base, hub, model.trust_remote_code)
            hub.download_weights()
        except DataError as error:
            raise UsageError(str(error)) from error
        return ModelRef(head=head, path=str(folder), trust_remote_code=model.trust_remote_code)
    scratch = source.scratch
    tokenizer = spec.models.tokenizer
    if tokenizer.train is not None:
        config = {**scratch.config, "vocab_size": tokenizer.train.vocab_size}
        return ModelRef(head=head, scratch=scratch.model_copy(update={"config": config}))
    return ModelRef(head=head, scratch=scratch, tokenizer=tokenizer.path)


def profile_table(made: Profile) -> Table:
    """The table of times, in milliseconds, and of activation memory, in MiB."""
    table = Table(
        title=f"{made.device}, sequences of {made.tokens} tokens; milliseconds", title_justify="left", show_edge=False
    )
    for heading in ("model", "part", "micro-batch"):
        table.add_column(heading, justify="right" if heading == "micro-batch" else "left")
    for heading in ("forward", "backward", "input gradient", "weight gradient", "activation MiB"):
        table.add_column(heading, justify="right")
    for name, model in made.models.items():
        parts = {"embedding": model.embedding_times, "layer": model.layer_times, "head": model.head_times}
        for part, rows in parts.items():
            for row in rows:
                times = (row.forward, row.backward, row.input_gradient, row.weight_gradient)
                cells = [f"{1e3 * t:.2f}" for t in times]
                table.add_row(name, part, str(row.micro_batch), *cells, f"{row.activation_bytes / 2**20:.2f}")
    if made.link is not None:
        table.caption = f"messages: {1e6 * made.link.latency:.0f} us, then {made.link.bytes_per_second / 1e9:.2f} GB/s"
    return table
