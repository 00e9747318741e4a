"""Serves a run's model with vLLM's own server, `vllm serve`, which has an OpenAI-compatible API. This file imports
nothing of vLLM."""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib.metadata
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.coordinator.data.text.chat_template import HUMAN_ASSISTANT_TEMPLATE, human_assistant_template
from dovetail.coordinator.reporting.model_card import LANGUAGE_MODELS
from dovetail.launch.liveness import temporary_folder
from dovetail.launch.ports import PortReservation
from dovetail.launch.processes import ProcessSpec
from dovetail.launch.spawn import ExecSpawner
from dovetail.launch.supervisor import Ended, Outcome, RestartBudget, Supervisor
from dovetail.manifest.checks.scratch import cpu_head_error
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.files.durable import read_object
from dovetail.protocol.http import direct
from dovetail.protocol.http.header_deadline import SERVER_KEEP_SECONDS
from dovetail.protocol.process.endings import POINTER
from dovetail.protocol.process.extras import missing_extras
from dovetail.protocol.process.inheritance import on_this_machine

HOST = "127.0.0.1"
START_SECONDS = 900.0
END_SECONDS = 20.0
# Defaults on CPUs. Variables that the user has set stay.
_CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
# vLLM's processes begin a line with this: "(Worker pid=7) ERROR 11-23 23:12:36 [core.py:1510] ".
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\] ?)?")
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def model_folder(run_dir: Path, name: str, iteration: int | None = None) -> Path:
    """The folder of a run's model. With `iteration` it is exported from the checkpoint after this iteration. Raises
    RunError and UsageError if the run has no such model or checkpoint."""
    if iteration is not None:
        if missing := missing_extras("--iteration", ["coordinator", "trainer"]):
            raise UsageError(missing)
        from dovetail.tools.checkpoint_export import exported

        return exported(run_dir.resolve(), name, iteration)
    folder = run_dir / "models" / name
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    if not run_dir.is_dir():
        raise RunError(f"{run_dir} does not exist; name the folder of a run, for example runs/quickstart")
    there = [other for other in LANGUAGE_MODELS if (run_dir / "models" / other / "config.json").is_file()]
    hint = f"it has: {', '.join(there)} (choose with --model)" if there else "has the run finished?"
    if any((run_dir / "checkpoints").glob("*/state.json")):
        hint += "; dovetail export, or --iteration here, takes one from a checkpoint"
    raise RunError(f"{run_dir} has no trained model {name!r}; {hint}")


def has_template(folder: Path) -> bool:
    """Whether the tokenizer in a model's folder has a chat template."""
    if any((folder / name).is_file() for name in TEMPLATES):
        return True
    return bool(read_object(folder / "tokenizer_config.json").get("chat_template"))


def has_own_template(folder: Path) -> bool:
    """Whether the tokenizer has a chat template that Dovetail did not write. Then only the end token ends a reply."""
    try:
        begin = HUMAN_ASSISTANT_TEMPLATE.partition("{%- elif")[0]  # an earlier release wrote another end
        written = begin in (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        written = False
    return has_template(folder) and not written


def serve_arguments(
    folder: Path, name: str, host: str, port: int, on_cpu: bool, given: Sequence[str] = ()
) -> list[str]:
    """The arguments of `vllm serve` after the model. `name`: the model's name in requests. `given`: the user's own
    arguments. They come last and win."""
    arguments = ["--served-model-name", name, "--host", host, "--port", str(port)]
    # auto: the longest context for which there is memory, up to the model's own limit.
    arguments += ["--max-model-len", "auto", "--disable-uvicorn-access-log"]
    if on_cpu:
        # Without this vLLM would compute a float32 model in 16 bits.
        arguments += ["--enforce-eager", "--dtype", str(_config(folder).get("dtype") or "auto")]
    if not has_template(folder):
        try:
            template = human_assistant_template(tokenizers.load(folder, "model"))
        except DataError:
            template = HUMAN_ASSISTANT_TEMPLATE
        arguments += ["--chat-template", template]
    return [*arguments, *given]


def serve_environment(on_cpu: bool, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of `vllm serve`, without Dovetail's plug-ins, which are for rollouts."""
    defaults = {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "VLLM_RPC_BASE_PATH": str(temporary_folder())}
    defaults["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(SERVER_KEEP_SECONDS)
    return defaults | (_CPU_ENVIRONMENT if on_cpu else {}) | dict(given)


def serve_command(folder: Path, arguments: Sequence[str], whole: bool | None = None) -> list[str]:
    """The command `vllm serve` of this Python, even if another one is first on PATH. `whole`: whether the installed
    distribution is called vllm. None: find out.

    vLLM's command line asks for the version of the distribution `vllm`. So it does not work in the builds for CPUs,
    which have another name. For these the API server is started as a module, which takes the same arguments."""
    if whole is None:
        whole = any(importlib.metadata.distributions(name="vllm"))
    module = ["vllm.entrypoints.cli.main", "serve"] if whole else ["vllm.entrypoints.openai.api_server", "--model"]
    return [sys.executable, "-P", "-m", *module, str(folder), *arguments]


def check_served(folder: Path, on_cpu: bool) -> None:
    """Raises RunError for a model that vLLM cannot serve on this machine, or whose weights vLLM would not find. vLLM
    itself would report this much later."""
    if glob.escape(str(folder)) != str(folder):
        raise RunError(f"vLLM finds no weights in a folder whose path has *, ? or [; rename it: {folder}")
    if on_cpu and (problem := cpu_head_error(_config(folder))):
        raise RunError(f"vLLM cannot serve this model on CPUs: {problem}")


def _config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises RunError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return dict(config)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{folder / 'config.json'} cannot be read: {error}") from error


def check_port(host: str, port: int) -> None:
    """Raises UsageError if no server can listen on the port. vLLM would report this only after its imports."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} on {host} is in use; choose another with --port") from error
        raise UsageError(f"cannot listen on {host}, port {port}: {error.strerror}; change --host or --port") from error


@contextlib.contextmanager
def own_server(
    folder: Path,
    name: str,
    on_cpu: bool,
    log: Path,
    note: Callable[[str], None],
    given: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[str, str]]:
    """Runs a server on this machine while the context is open. Yields its address and its key. The server also ends
    when this process ends, even if it is killed. `name`: the model's name in requests. `log`: the file of the server's
    output. `given`: further arguments of `vllm serve`. `variables`: environment variables for the server, besides this
    process's own. `given_up`: whether to stop waiting for the start. Raises RunError if the server does not start."""
    key = secrets.token_hex(16)
    environment = serve_environment(on_cpu, {**on_this_machine(os.environ), **(variables or {})}) | {
        "VLLM_API_KEY": key
    }
    ports = PortReservation(HOST)
    port = ports.reserve(["vLLM"])["vLLM"]
    command = serve_command(folder, serve_arguments(folder, name, HOST, port, on_cpu, given))
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    note(f"starting vLLM with {folder} (log: {log})")
    spec = ProcessSpec(name, command[3], environment, log, arguments=command[4:])
    # The server has a session of its own, so that Ctrl-C stops a reply and not the server.
    supervisor = Supervisor([(spec, ExecSpawner(environment, log))], NeverAgain())
    try:
        supervisor.start()
        _wait(f"http://{HOST}:{port}", supervisor, log, given_up)
        yield f"http://{HOST}:{port}", key
    finally:
        supervisor.stop(END_SECONDS)
        ports.close()


class NeverAgain:
    """Nothing is started again."""

    budget = RestartBudget(0)

    def judge(self, ended: Ended) -> Outcome:
        return Outcome(False)


def _wait(url: str, supervisor: Supervisor, log: Path, given_up: Callable[[], bool]) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        if direct.ask(f"{url}/health", 5.0) is not None:
            return
        if supervisor.step(0.2) is not None:
            raise RunError(f"vLLM ended before it could serve: {last_error(log)} (log: {log})")
        if given_up():
            raise RunError("the start of vLLM was given up")
        if time.monotonic() > end:
            raise RunError(f"vLLM did not serve within {START_SECONDS:.0f} s (log: {log})")


def last_error(log: Path) -> str:
    """The last line of a log that names an error, without vLLM's prefix. Lines that only point to another error are
    used if there is no better one. If no line names an error, it is the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [_PREFIX.sub("", line) for line in lines if "Error: " in line or "error: " in line]
    causes = [line for line in errors if not POINTER.search(line)]
    return (causes or errors or lines or ["it wrote nothing"])[-1][-400:]
