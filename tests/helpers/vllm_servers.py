"""Real vLLM servers of a tiny Llama, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.manifest.types import RLHFJob
from dovetail.protocol.process.env import ProcessEnv
from helpers.free_ports import free_port
from helpers.nursery import NURSERY, Adopted
from helpers.patience import PATIENCE

TOKEN = "a-secret"
GREEDY = {"temperature": 0.0, "max_tokens": 40, "logprobs": 0, "ignore_eos": True, "detokenize": False}


def tiny_llama(**changes: Any) -> Any:
    """A LlamaConfig of some 300,000 parameters, tied as most small models are, with the least head size that vLLM's CPU
    attention takes."""
    from transformers import LlamaConfig

    fields = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "architectures": ["LlamaForCausalLM"],
        "initializer_range": 0.05,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    return LlamaConfig(**(fields | changes))


def make_run(
    run_dir: Path,
    config: Any,
    prompt_tokens: int,
    tokens: int,
    concurrent: int = 16,
    gpu: Any = None,
    dtype: str = "Auto",
    replay: bool = False,
) -> None:
    """What servers read of a run directory: job.json, for prompts and responses of at most so many tokens and so many
    requests at once, and the actor's config. `gpu`, `dtype`: of the rollouts' group.
    `replay`: servers say which experts each token got."""
    config.save_pretrained(run_dir / "models" / "actor-config")
    job = {
        "apiVersion": "dovetail.dev/v1beta1",
        "kind": "RLHFJob",
        "metadata": {"name": "test"},
        "spec": {
            "models": {"actor": {"source": {"scratch": {}}}},
            "data": {"maxPromptTokens": prompt_tokens},
            "generation": {"maxTokens": tokens, "maxConcurrent": concurrent},
            "ppo": {"routingReplay": replay},
            "groups": [
                {"name": "rollout", "roles": ["rollout"], "gpu": gpu or {}, "dtype": dtype, "replicas": 2},
                {"name": "train", "roles": ["trainer"]},
            ],
        },
    }
    (run_dir / "job.json").write_text(RLHFJob.model_validate(job).model_dump_json(by_alias=True))


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.05)


@dataclass
class Server:
    name: str
    url: str
    process: Adopted
    log: Path

    @staticmethod
    def start(name: str, run_dir: Path, coordinator: str, *arguments: str) -> Server:
        """`python -m dovetail.rollout.serving.vllm_server`, as a pod runs it, with further vLLM arguments."""
        port = free_port()
        env = ProcessEnv("test", name, run_dir, coordinator, TOKEN, "127.0.0.1", port, 0, "rollout", 0, 1)
        log = run_dir / f"{name}.log"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_PORT": str(free_port()), **env.write()}
        process = NURSERY.fork(log, variables, "dovetail.rollout.serving.vllm_server", *arguments)
        return Server(name, f"http://127.0.0.1:{port}", process, log)

    def close(self) -> None:
        """Kill it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def failure(self) -> str:
        """The log from its first traceback on, for assertion messages."""
        log = self.log.read_text()
        cause = log.find("Traceback")
        return log[cause : cause + 6000] if cause >= 0 else log[-6000:]

    def healthy(self) -> bool:
        assert self.process.poll() is None, f"{self.name} ended: {self.failure()}"
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=60) as reply:
            return bool(reply.status == 200)
        return False

    def call(self, path: str, body: Any = None, token: str = TOKEN, method: str | None = None) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                return reply.status, json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(
        self, prompt: list[int], kv_transfer_params: dict[str, Any] | None = None, **params: Any
    ) -> tuple[list[int], list[float], str]:
        """Tokens, log-probabilities and finish reason."""
        body = {"model": "actor", "token_ids": prompt, "sampling_params": params}
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        status, reply = self.call("/inference/v1/generate", body)
        assert status == 200, reply
        choice = reply["choices"][0]
        return choice["token_ids"], [c["logprob"] for c in choice["logprobs"]["content"]], choice["finish_reason"]

    def stream(
        self,
        prompt: list[int],
        stop_after: int,
        request_id: str = "r1",
        kv_transfer_params: dict[str, Any] | None = None,
        **params: Any,
    ) -> tuple[list[int], list[float]]:
        """The tokens that came before and after asking, at `stop_after`, to abort."""
        tokens: list[int] = []
        logprobs: list[float] = []
        body = {"model": "actor", "token_ids": prompt, "sampling_params": params, "stream": True}
        body["request_id"] = request_id
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        request = urllib.request.Request(
            self.url + "/inference/v1/generate",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        aborted = False
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
                    logprobs += [c["logprob"] for c in (choice.get("logprobs") or {}).get("content", [])]
                if len(tokens) >= stop_after and not aborted:
                    aborted = True
                    ids = {"request_ids": [f"generate-tokens-{request_id}"]}
                    assert self.call("/inference/v1/abort_requests", ids)[0] == 200
        return tokens, logprobs

    def weight_version(self) -> int | None:
        status, info = self.call("/dovetail/info")
        assert status == 200
        version: int | None = info["weight_version"]
        return version
