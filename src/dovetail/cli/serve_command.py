"""`dovetail serve`: starts an OpenAI-compatible server of a run's model, with vLLM's own command."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from dovetail.cli.job_arguments import checkpoint_option, run_dir_argument
from dovetail.coordinator.reporting.model_card import LANGUAGE_MODELS
from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.protocol.process.extras import Extra, require
from dovetail.tools.serving.served_result import (
    check_port,
    check_served,
    model_folder,
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
