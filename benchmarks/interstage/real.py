"""Real vLLM servers and scorers on this machine, with the models of bench_e2e."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.settings import Folder, Settings

# Starting servers and sending them weights is the tests' business too.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from dovetail.protocol.messages import ModelRef
from dovetail.protocol.process.env import ProcessEnv
from helpers.free_ports import free_port
from helpers.vllm_servers import TOKEN, Server, make_run, wait_for
from helpers.weight_trainer import Trainer
from interstage.stage import Place

START_SECONDS = 400.0


@contextmanager
def servers(run_dir: Path, models: Folder, settings: Settings, count: int) -> Iterator[list[Place]]:
    """`count` servers with weights, each with a scorer that holds all three models; one thread each."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    make_run(
        run_dir,
        AutoConfig.from_pretrained(models.actor),
        settings.prompt_tokens,
        settings.max_new_tokens,
        concurrent=settings.batch,
    )
    AutoTokenizer.from_pretrained(models.actor).save_pretrained(run_dir / "tokenizer")
    rollouts = [Server.start(f"rollout-{i}", run_dir, "http://127.0.0.1:9") for i in range(count)]
    scorers = [start_scorer(f"rollout-{i}-scorer", run_dir) for i in range(count)]
    try:
        for server in [*rollouts, *scorers]:
            path = "/health" if server in rollouts else "/healthz"
            wait_for(lambda s=server, p=path: up(s, p), START_SECONDS, f"{server.name} to be healthy")
        trainer = Trainer(rollouts)
        errors = trainer.publish(AutoModelForCausalLM.from_pretrained(models.actor).float(), 1, 120)
        trainer.sender.close()
        if any(errors.values()):
            raise RuntimeError(f"the servers took no weights: {errors}")
        held = {
            "reference": ModelRef(head="lm", path=str(models.actor)),
            "reward": ModelRef(head="value", path=str(models.reward)),
            "critic": ModelRef(head="value", path=str(models.critic)),
        }
        for scorer in scorers:
            status, reply = scorer.call("/v1/load", {"models": {k: v.model_dump() for k, v in held.items()}})
            if status != 200:
                raise RuntimeError(f"{scorer.name} could not load its models: {reply}")
        yield [
            Place(r.url, s.url, {"sampler": r.call("/dovetail/info")[1]["sampler"]})
            for r, s in zip(rollouts, scorers, strict=True)
        ]
    finally:
        for server in [*rollouts, *scorers]:
            server.close()


def start_scorer(name: str, run_dir: Path) -> Server:
    port = free_port()
    env = ProcessEnv("bench", name, run_dir, "http://127.0.0.1:9", TOKEN, "127.0.0.1", port, 0, "rollout", 0, 1)
    log = run_dir / f"{name}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dovetail.rollout.scoring.scorer"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env.write()},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    return Server(name, f"http://127.0.0.1:{port}", process, log)


def up(server: Server, path: str) -> bool:
    if server.process.poll() is not None:
        raise RuntimeError(f"{server.name} ended: {server.failure()}")
    try:
        with urllib.request.urlopen(server.url + path, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
