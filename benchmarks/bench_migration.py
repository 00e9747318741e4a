"""What moving one sample to another vLLM server costs it: its tokens prefilled again, or its keys and values moved.

    python benchmarks/bench_migration.py [--tokens 64 512 4096] [--rounds 5] [--json FILE]

Two real servers on this machine. Each round fills a sample on the first, stops it in mid-response and measures, from
its resubmission to its next token on the second, one way and the other, with prompts that no prefix cache has seen.
`export` is what the first server's engine spends on keeping the blocks. Medians of the rounds; the first round of all
is not counted. Prints a table, then one line of JSON for each way and length."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

# Starting servers and sending them weights is the tests' business too.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np

from dovetail.coordinator.samples.migration_costs import Mechanism, MigrationCosts
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.messages import HOLD, PULL
from helpers.vllm_servers import GREEDY, TOKEN, Server, tiny_llama, wait_for
from helpers.weight_trainer import Trainer, actor_of

RESPONSE = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also append the JSON lines to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        config = write_job(run_dir, options.hidden, options.layers, max(options.tokens))
        servers = [Server.start(f"rollout-{i}", run_dir, "http://127.0.0.1:9") for i in range(2)]
        try:
            for server in servers:
                wait_for(server.healthy, 300, f"{server.name} to be healthy")
            trainer = Trainer(servers)
            if any((errors := trainer.publish(actor_of(config, 1), 1, 120)).values()):
                raise RuntimeError(f"the servers took no weights: {errors}")
            trainer.sender.close()
            results = measure(servers, options.tokens, options.rounds)
        finally:
            for server in servers:
                server.close()
    report(results, options.json)
    return 0


def write_job(run_dir: Path, hidden: int, layers: int, longest: int) -> Any:
    config = tiny_llama(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=longest + 128,
    )
    config.save_pretrained(run_dir / "models" / "actor-config")
    job = {
        "apiVersion": "dovetail.dev/v1beta1",
        "kind": "RLHFJob",
        "metadata": {"name": "bench"},
        "spec": {
            "models": {"actor": {"source": {"scratch": {}}}},
            "data": {"maxPromptTokens": longest},
            "generation": {"maxTokens": 64, "maxConcurrent": 4},
            "groups": [{"name": "rollout", "roles": ["rollout"]}, {"name": "train", "roles": ["trainer"]}],
        },
    }
    (run_dir / "job.json").write_text(RLHFJob.model_validate(job).model_dump_json(by_alias=True))
    return config


def first_token(server: Server, prompt: list[int], kv: dict[str, Any] | None = None) -> float:
    """Seconds from the request to its first token."""
    params = GREEDY | {"max_tokens": 1}
    body = {"model": "actor", "token_ids": prompt, "sampling_params": params, "stream": True, "kv_transfer_params": kv}
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(server.url + "/inference/v1/generate", json.dumps(body).encode(), headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as reply:
        for line in reply:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["token_ids"]:
                return time.perf_counter() - began
    raise RuntimeError("the server made no token")


def measure(servers: list[Server], lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    one, two = servers
    ability = one.call("/dovetail/info")[1]["kv"]
    costs = MigrationCosts(ability["token_bytes"], ability["block_tokens"])
    random = np.random.default_rng(0)
    results = []
    for length in lengths:
        seconds: dict[Mechanism, list[float]] = {m: [] for m in Mechanism}
        for number in range(rounds + 1):
            prompt = random.integers(3, 8192, length - RESPONSE).tolist()
            key = f"sample-{length}-{number}"
            hold = {HOLD: {"key": key, "weights": 1}}
            part, _ = one.stream(prompt, RESPONSE, key, hold, **GREEDY)
            pull = {PULL: {"key": key, "host": ability["host"], "ports": ability["ports"], "weights": 1}}
            moved = first_token(two, prompt + part[:RESPONSE], pull)
            prefilled = first_token(two, random.integers(3, 8192, length).tolist())
            if number:
                seconds[Mechanism.KV].append(moved)
                seconds[Mechanism.TOKENS].append(prefilled)
        taken = re.findall(rf"sample-{length}-[1-9]\d*: .* taken over", two.log.read_text())
        kept = re.findall(rf"sample-{length}-[1-9]\d*: .* kept in ([\d.]+) ms", one.log.read_text())
        if len(taken) != rounds or len(kept) != rounds:
            raise RuntimeError(f"{len(kept)} of {rounds} samples were kept and {len(taken)} taken over")
        for mechanism, values in seconds.items():
            result: dict[str, Any] = {
                "benchmark": "migration",
                "tokens": length,
                "mechanism": mechanism.value,
                "seconds": statistics.median(values),
            }
            if mechanism is Mechanism.KV:
                nbytes = costs.nbytes(length)
                result["bytes"] = nbytes
                result["megabytes_per_second"] = nbytes / result["seconds"] / 1e6
                result["export_seconds"] = statistics.median(map(float, kept)) / 1e3
                result["speedup_over_tokens"] = statistics.median(seconds[Mechanism.TOKENS]) / result["seconds"]
            results.append(result)
    return results


def report(results: list[dict[str, Any]], path: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("tokens", "way", "ms to the next token", "MB", "MB/s", "export ms", title="moving one sample")
    for r in results:
        extra = []
        if r["mechanism"] == "kv":
            extra = [f"{r['bytes'] / 1e6:.1f}", f"{r['megabytes_per_second']:.0f}", f"{1e3 * r['export_seconds']:.1f}"]
        table.add_row(str(r["tokens"]), r["mechanism"], f"{1e3 * r['seconds']:.1f}", *extra)
    Console().print(table)
    lines = [json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in r.items()}) for r in results]
    print("\n".join(lines))
    if path is not None:
        with path.open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
