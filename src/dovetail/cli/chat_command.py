"""`dovetail chat` is a dialogue with a run's model. `dovetail serve` starts an OpenAI-compatible server of it, with
vLLM's own command."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from rich.console import Console

from dovetail.cli.job_arguments import checkpoint_option, run_dir_argument
from dovetail.coordinator.reporting.model_card import LANGUAGE_MODELS
from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.protocol.errors import UsageError
from dovetail.protocol.process.extras import Extra, is_installed, require
from dovetail.tools.serving.chat import Replier
from dovetail.tools.serving.served_result import (
    check_port,
    check_served,
    has_own_template,
    model_folder,
    own_server,
    serve_arguments,
    serve_command,
    serve_environment,
)

PORT = 8000
model_option = click.option(
    "--model",
    "--stage",
    "model",
    type=click.Choice(LANGUAGE_MODELS),
    default="actor",
    show_default=True,
    help="Which of the run's models.",
)


def vllm_extra() -> Extra:
    """The extra that installs vLLM for this machine."""
    return "rollout-gpu" if cuda_devices() else "rollout-cpu"


@click.command(context_settings={"ignore_unknown_options": True})
@run_dir_argument
@model_option
@checkpoint_option
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on. 0.0.0.0: all.")
@click.option("--port", type=click.IntRange(1, 65535), default=PORT, show_default=True, help="The port to listen on.")
@click.argument("vllm_arguments", metavar="[VLLM_ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def serve(
    run_dir: Path, model: str, iteration: int | None, host: str, port: int, vllm_arguments: tuple[str, ...]
) -> None:
    """Serve a run's model with an OpenAI-compatible API.

    This becomes vLLM's own server, as `vllm serve` is. Further arguments are vLLM's. VLLM_API_KEY sets a key that
    requests must bring.

    \b
      dovetail serve runs/quickstart --port 8000
      dovetail chat --url http://127.0.0.1:8000
      dovetail serve runs/quickstart --model sft --gpu-memory-utilization 0.5
      dovetail serve runs/quickstart --iteration 10
    """
    require("dovetail serve", [vllm_extra()])
    folder = model_folder(run_dir, model, iteration)
    on_cpu = not cuda_devices()
    check_served(folder, on_cpu)
    check_port(host, port)
    arguments = serve_arguments(folder, model, host, port, on_cpu, vllm_arguments)
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    click.echo(f"Serving {folder} as {model!r} at {address}/v1. Ctrl-C ends it. In another shell:", err=True)
    click.echo(f"  dovetail chat {shlex.quote(str(run_dir))} --url {address}", err=True)
    command = serve_command(folder, arguments)
    sys.stdout.flush()
    os.execve(command[0], command, serve_environment(on_cpu, os.environ))


# The share of a GPU's memory for each of two servers.
SHARE = 0.4


@click.command()
@click.argument("run_dir", metavar="[RUN_DIR]", required=False, type=click.Path(path_type=Path))
@model_option
@checkpoint_option
@click.option(
    "--compare",
    nargs=2,
    type=click.Choice(LANGUAGE_MODELS),
    metavar="MODEL MODEL",
    help="Ask two of the run's models at once, for example --compare sft actor.",
)
@click.option("--system", help="The system prompt.")
@click.option(
    "--url",
    multiple=True,
    help="Talk through this OpenAI-compatible server, such as that of dovetail serve. With --compare: one for each "
    "model.",
)
@click.option(
    "--engine",
    type=click.Choice(["vllm", "transformers"]),
    help="Without --url: start a vLLM server, or load the model in this process.  [default: vllm if there are GPUs]",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="The longest reply, in tokens."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0.0),
    default=0.7,
    show_default=True,
    help="0 always takes the likeliest token.",
)
def chat(
    run_dir: Path | None,
    model: str,
    iteration: int | None,
    compare: tuple[str, str] | None,
    system: str | None,
    url: tuple[str, ...],
    engine: str | None,
    max_tokens: int,
    temperature: float,
) -> None:
    """Talk with a run's model.

    /reset forgets the dialogue so far, /system TEXT sets the system prompt, /quit ends the chat. Ctrl-C stops a reply.
    You can also pipe lines in:

    \b
      echo "hello there" | dovetail chat runs/quickstart
      dovetail chat runs/quickstart --compare sft actor
      dovetail chat --url http://127.0.0.1:8000
    """
    from dovetail.tools.serving.chat import Sampling
    from dovetail.tools.serving.conversation import ColumnScreen, PlainScreen, Screen, converse, typed_lines

    if run_dir is None and not url:
        raise UsageError("name the folder of a run, for example runs/quickstart, or a server with --url")
    if engine is not None and url:
        raise UsageError("--engine says how a model is loaded here, and --url where it is served; give one of them")
    if run_dir is None and iteration is not None:
        raise UsageError("--iteration is of a run; name its folder, for example runs/quickstart")
    if compare and iteration is not None:
        raise UsageError("--iteration is for one model; leave out --compare")
    names = tuple(dict.fromkeys(compare)) if compare else (model,)
    if url and len(url) != len(names):
        raise UsageError(f"give --url {len(names)} times, once for each model: {', '.join(names)}")
    person = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Piped files of questions are UTF-8 in any locale. Characters that cannot be read are replaced.
        sys.stdin.reconfigure(encoding=None if person else "utf-8", errors="replace")

    def write(text: str) -> None:
        click.echo(text, nl=False)

    with contextlib.ExitStack() as stack:
        models: dict[str, Replier] = {}
        for number, name in enumerate(names):
            if url:
                require("dovetail chat --url", ["client"])
                folder = None if run_dir is None else model_folder(run_dir, name, iteration)
                key = os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY")
                models[name] = stack.enter_context(_served(folder, name, url[number], key))
            else:
                assert run_dir is not None
                chosen = engine or ("vllm" if cuda_devices() and is_installed("vllm") else "transformers")
                share = ["--gpu-memory-utilization", str(SHARE)] if len(names) > 1 and cuda_devices() else []
                models[name] = stack.enter_context(_loaded(run_dir, name, iteration, chosen, share))
        if person:
            when = "" if iteration is None else f" after iteration {iteration}"
            what = " and ".join(url or [f"{Path(str(run_dir)) / 'models' / name}{when}" for name in names])
            click.echo(f"Talking with {what}. Ctrl-C stops a reply, /reset starts anew, /quit ends.")
        screen: Screen = PlainScreen(write)
        if len(models) > 1 and sys.stdout.isatty():
            screen = ColumnScreen(Console())
        lines = typed_lines(_prompt(), write) if person else iter(sys.stdin)
        tell = (lambda error: click.echo(f"Error: {error}", err=True)) if person else None
        converse(models, lines, write, Sampling(max_tokens, temperature), screen, system, tell)


def _prompt() -> Callable[[], str]:
    """Ask for a line that can be edited. The arrow keys bring earlier lines back."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - with it, input() edits lines
    return lambda: input("you> ")


@contextlib.contextmanager
def _served(folder: Path | None, name: str, address: str, key: str | None) -> Iterator[Replier]:
    """A model behind a server. `folder`: the model's folder if the model is a run's. The server must then call it
    `name`."""
    from dovetail.tools.serving.chat import REPLY_ENDS
    from dovetail.tools.serving.chat_server import ServedModel

    ends = () if folder is None or has_own_template(folder) else REPLY_ENDS
    served = ServedModel(address, None if folder is None else name, key, ends)
    try:
        yield served
    finally:
        served.close()


@contextlib.contextmanager
def _loaded(run_dir: Path, name: str, iteration: int | None, engine: str, given: list[str]) -> Iterator[Replier]:
    """A model that this command loads until the chat ends. `given`: further arguments for vLLM."""
    if engine == "transformers":
        require("dovetail chat", ["trainer"])
        from dovetail.tools.serving.chat import ChatModel

        yield ChatModel(run_dir, name, iteration)
        return
    require("dovetail chat --engine vllm", ["client", vllm_extra()])
    folder = model_folder(run_dir, name, iteration)
    on_cpu = not cuda_devices()
    check_served(folder, on_cpu)
    log = run_dir / "logs" / f"chat-{name}.log"
    with (
        own_server(folder, name, on_cpu, log, lambda text: click.echo(text, err=True), given) as (address, key),
        _served(folder, name, address, key) as served,
    ):
        yield served
