"""`dovetail debug`: commands for those who change the code."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dovetail.cli.job_arguments import run_dir_argument
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.process.extras import require

if TYPE_CHECKING:
    from dovetail.trainer.weights.compare_weights import Difference


@click.group()
def debug() -> None:
    """Tools for developers of Dovetail. CONTRIBUTING.md shows how to use them."""


@debug.command()
@run_dir_argument
@click.option("--iteration", type=click.IntRange(1), required=True, help="The PPO iteration to run again.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the replay's logs and weights in this folder.  [default: a temporary folder, kept on a difference]",
)
@click.option(
    "--session",
    metavar="PROMPT/SAMPLE",
    help="Play this episode of the iteration again in place of its training, such as 3/0 (spec.sessions).",
)
def replay(run_dir: Path, iteration: int, keep: Path | None, session: str | None) -> None:
    """Run a stored iteration again, and compare the weights with those of the run.

    The trainer ranks load the last checkpoint before the iteration. They train on the stored batches, up to the next
    weights that the run kept: a checkpoint, or the exported models. No rollout and no scorer is started. The run
    directory is not changed.

    The exit code is 0 if the weights are the same bits, and 1 if they are not. Then the first metric and the first
    tensor that differ are named.

    With --session one episode is played again. No environment and no agent is asked, because the store has what they
    said. Each turn's prompt is made again from it, and the turn is drawn again by a vLLM server with the weights of the
    episode. On GPUs this needs spec.generation.batchInvariant, because tokens depend on the batch without it.

    \b
      dovetail debug replay runs/quickstart --iteration 11
      dovetail debug replay runs/agent --iteration 11 --session 3/0
    """
    require("dovetail debug replay", ["coordinator", "trainer"])
    from dovetail.tools.replay import first_difference, read_replay, run_replay

    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"--keep {keep} is not empty, and the replay would write into it; name a new folder")
    if session is not None:
        _replay_episode(run_dir, iteration, session, keep)
        return
    found = read_replay(run_dir, iteration)
    section, ranks = found.section, found.plan.world_size
    start = f"checkpoint {section.first - 1}" if section.first > 1 else "the beginning of PPO"
    span = (
        f"iteration {section.first}"
        if section.first == section.last
        else f"iterations {section.first} to {section.last}"
    )
    click.echo(f"Replaying {span} from {start} on {ranks} trainer rank{'s' if ranks > 1 else ''}.")
    with _folder(keep) as folder:
        outcome = run_replay(found, folder, click.echo)
        changed = [i for i, metrics in outcome.metrics.items() if first_difference(found.metrics[i], metrics)]
        if section.target is None:
            problem = f"the metrics of iteration {changed[0]} are not those of the run" if changed else ""
            result = "The metrics are those of the run. It kept no weights after this iteration to compare with."
        else:
            tensors, differences = compared(found.run_dir, outcome.folder, section.target, found.models)
            problem = different(section.last, section.target, tensors, differences)
            weights = f"The weights after iteration {section.last} are those of {section.target}"
            result = f"{weights}, bit for bit: {tensors} tensors."
        if problem:
            raise RunError(f"{problem} (logs and weights: {folder})")
        click.echo(result)


def _replay_episode(run_dir: Path, iteration: int, session: str, keep: Path | None) -> None:
    from dovetail.coordinator.store.samples import Key
    from dovetail.tools.episode_replay import kept_episode, replay_episode

    if (place := re.fullmatch(r"(\d+)/(\d+)", session)) is None:
        raise UsageError(f"--session is {session}; it takes the numbers of prompt and sample, such as 3/0")
    kept = kept_episode(run_dir, Key(iteration, int(place[1]), int(place[2])))
    with _folder(keep) as folder:
        replay_episode(run_dir, kept, folder / "logs" / "vllm.log", click.echo)
        click.echo(f"Episode {session} of iteration {iteration} is that of the run: {len(kept.requests)} turns.")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Where a replay writes. A temporary folder is deleted if nothing is raised."""
    folder = (keep or Path(tempfile.mkdtemp(prefix="dovetail-replay-"))).resolve()
    yield folder
    if keep is None:
        shutil.rmtree(folder, ignore_errors=True)


@debug.command()
@click.argument("one", metavar="RUN_A", type=click.Path(path_type=Path))
@click.argument("other", metavar="RUN_B", type=click.Path(path_type=Path))
@click.option(
    "--layers",
    is_flag=True,
    help="Where a sampled token or a log-probability differs first, run the models of both runs on it here, and name "
    "the first layer that differs. Both runs must keep the weights that drew it.",
)
def diff(one: Path, other: Path, layers: bool) -> None:
    """Name the first thing in which two runs differ: a setting, then a result.

    Results are compared bit for bit, in the order in which one follows from the other: prompts, sampled tokens,
    log-probabilities, scores, advantages, metrics such as the gradient's norm, weights. Only what both runs still keep
    can be compared: batches and weights since the oldest kept checkpoint, and for all iterations which prompts were
    trained, the lengths of the responses, rewards and metrics.

    The exit code is 0 if all results are the same bits, and 1 if not.

    \b
      dovetail debug diff runs/demo runs/demo-again
    """
    require("dovetail debug diff", ["coordinator", "trainer"])
    from dovetail.tools.run_diff import diff_runs

    found = diff_runs(one, other, layers)
    for setting in found.settings:
        click.echo(f"Setting: {setting}")
    if not found.sentence:
        click.echo(f"All results that both runs keep are the same to the bit, through iteration {found.through}.")
        return
    if found.through:
        click.echo(f"The same to the bit through iteration {found.through}.")
    for line in found.evidence:
        click.echo(f"  {line}")
    raise RunError(f"the first difference: {found.sentence}")


def compared(run_dir: Path, replayed: Path, target: str, models: list[str]) -> tuple[int, list[Difference]]:
    """Compare `target` of both folders. Returns the number of tensors, and the differences."""
    from dovetail.trainer.weights.compare_weights import compare_checkpoints, compare_models

    if not models:
        found = [compare_checkpoints(run_dir / target, replayed / target)]
    else:
        folders = sorted(path.name for path in (replayed / target).iterdir())
        found = [compare_models(run_dir / target / name, replayed / target / name).of_model(name) for name in folders]
    return sum(part.tensors for part in found), [each for part in found for each in part.differences]


def different(iteration: int, target: str, tensors: int, differences: Sequence[Difference]) -> str:
    """A sentence about the tensors that differ. Empty if none differs."""
    if not differences:
        return ""
    count, first = f"{len(differences)} of {tensors} tensors differ", differences[0].sentence()
    return f"the weights after iteration {iteration} are not those of {target}: {count}. The first is {first}"
