"""`dovetail profile`: measure a job's models and this machine's messages for the schedule chooser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import click
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from dovetail.api.messages import ModelRef
from dovetail.api.profile import ModelTimes, Profile
from dovetail.api.types import ModelSource, RLHFJobSpec
from dovetail.local.errors import RunError, UsageError


@click.command()
@click.argument("manifest", metavar="JOB.yaml", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("profile.json"))
@click.option(
    "--micro-batch",
    "micro_batches",
    type=click.IntRange(1),
    multiple=True,
    help="Sequences; may be given more than once.  [default: spec.ppo.microBatchSize and its half]",
)
@click.option("--tokens", type=click.IntRange(2), help="Length of a sequence.  [default: spec.data.maxTokens]")
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Passes to take the median of.")
@click.option("--no-link", is_flag=True, help="Do not measure messages between two processes.")
def profile(
    manifest: Path, output: Path, micro_batches: tuple[int, ...], tokens: int | None, repeats: int, no_link: bool
) -> None:
    """Measure the passes of a job's actor and critic on this machine.

    Times forward and backward passes and the backward's two halves, of embedding, one layer and head apart, the bytes
    of activations, and latency and bandwidth of messages between two processes. Weights are random; only
    configurations are read. `dovetail run --profile` and `dovetail schedule --profile` take the file.
    """
    from dovetail.api.validation import load_manifest

    spec = load_manifest(manifest).spec
    base = manifest.resolve().parent
    sizes = sorted(set(micro_batches) or {spec.ppo.micro_batch_size, max(1, spec.ppo.micro_batch_size // 2)})
    console = Console()
    with console.status("measuring") as status:
        made = _measure(spec, base, sizes, tokens or spec.data.max_tokens, repeats, not no_link, status.update)
    try:
        output.write_text(made.model_dump_json(by_alias=True, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}.") from error
    console.print(profile_table(made))
    console.print(f"\nWritten: {output}", highlight=False, soft_wrap=True)


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

    from dovetail.models import ModelError
    from dovetail.trainer.profile import measure_link, measure_model

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    models: dict[str, ModelTimes] = {}
    for name in ("actor", "critic"):
        if name == "critic" and spec.ppo.advantage != "gae":
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
    """Where the configuration comes from: the model's own source, else the reward model's or the actor's."""
    from dovetail.coordinator.data.errors import DataError
    from dovetail.coordinator.data.models import resolve

    sources = [spec.models.actor] if name == "actor" else [spec.models.critic, spec.models.reward, spec.models.actor]
    model = next(m for m in sources if m.source is not None)
    source = model.source
    assert isinstance(source, ModelSource)
    head: Literal["lm", "value"] = "value" if name == "critic" else "lm"
    if source.scratch is None:
        try:
            folder = resolve(source, f"spec.models.{name}", base, model.trust_remote_code)
        except DataError as error:
            raise UsageError(str(error)) from error
        return ModelRef(head=head, path=str(folder), trust_remote_code=model.trust_remote_code)
    scratch = source.scratch
    tokenizer = spec.models.tokenizer
    if tokenizer.train is not None:
        config = {**scratch.config, "vocab_size": tokenizer.train.vocab_size}
        return ModelRef(head=head, scratch=scratch.model_copy(update={"config": config}))
    return ModelRef(head=head, scratch=scratch, tokenizer=tokenizer.path)


def read_profile(path: Path) -> Profile:
    """A profile that the command above wrote; raises UsageError."""
    try:
        return Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(f"{path} is no profile: {where}: {first['msg']}; make one with dovetail profile.") from error


def profile_table(made: Profile) -> Table:
    """Milliseconds of each part."""
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
