"""Weights of a model of some 480 MB from one trainer process to two vLLM servers on this machine's CPUs.

    python benchmarks/bench_weights.py [--rounds 5] [--json FILE]

Four ways through the same three processes, the same Gloo communicator and the same calls, in turn:

- raw: Gloo broadcasts of the same bytes from a ready buffer; received, neither checked nor loaded
- sent: packed, with checksums, double-buffered; verified by the servers but not loaded
- ours: the same, loaded into the model as it arrives
- one by one: a broadcast for each tensor, loaded before the next is asked for

`send` is the trainer's time from the offer to the last byte; `total` ends when both servers could serve again. All
times are the best of the rounds: other programs only ever add to them. On a machine whose cores also carry the
loopback traffic, loading (vLLM repacks every matrix for oneDNN) takes its time from the transfer; `sent` shows the
transfer alone. Prints a table, then one line of JSON for each way."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import queue
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dovetail.manifest.types import RLHFJob
from dovetail.protocol.messages import Offer, Publish, Receive, Receiver
from dovetail.protocol.process.env import ProcessEnv
from dovetail.rollout.serving.preload import preload

TOKEN = "benchmark"
# The version number tells the benchmark's receiving engine which way is meant.
WAYS = {"raw": 1_000_000, "sent": 2_000_000, "ours": 3_000_000, "one by one": 4_000_000}


def way_of(version: int) -> str:
    return next(way for way, base in reversed(WAYS.items()) if version >= base)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also append the JSON lines to this file")
    options = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        config = write_job(run_dir, options.hidden, options.layers)
        servers = [start(f"rollout-{i}", run_dir) for i in range(2)]
        try:
            for _, url, process in servers:
                wait_healthy(url, process)
            results = measure([(name, url) for name, url, _ in servers], config, options.rounds)
        finally:
            for _, _, process in servers:
                process.terminate()
            for _, _, process in servers:
                process.join(20)
                process.kill()
    report(results, options.json)
    return 0


def write_job(run_dir: Path, hidden: int, layers: int) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(run_dir / "models" / "actor-config")
    backend = ["--weight-transfer-config", '{"backend": "bench"}']
    job = {
        "apiVersion": "dovetail.dev/v1beta1",
        "kind": "RLHFJob",
        "metadata": {"name": "bench"},
        "spec": {
            "models": {"actor": {"source": {"scratch": {}}}},
            "data": {"maxPromptTokens": 64},
            "generation": {"maxTokens": 64, "maxConcurrent": 4},
            "groups": [
                {
                    "name": "rollout",
                    "roles": ["rollout"],
                    "vllmArgs": backend,
                },
                {"name": "train", "roles": ["trainer"]},
            ],
        },
    }
    (run_dir / "job.json").write_text(RLHFJob.model_validate(job).model_dump_json(by_alias=True))
    return config


# ---------------------------------------------------------------- receiving end


def serve(env: ProcessEnv) -> None:
    log = os.open(env.run_dir / f"{env.name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(env.write())
    import torch
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from dovetail.models.links.deadline import Deadline
    from dovetail.models.transfer import message_bytes
    from dovetail.rollout.serving.vllm_server import main as serve_main
    from dovetail.rollout.weights_vllm import DovetailUpdateInfo, DovetailWeightTransferEngine

    class Engine(DovetailWeightTransferEngine):
        def receive_weights(self, update_info: DovetailUpdateInfo) -> None:
            receive = Receive.model_validate(update_info.receive)
            way = way_of(receive.offer.version)
            if way == "ours":
                return super().receive_weights(update_info)
            if way == "sent":
                for _ in self._receiver.receive(receive):
                    pass
                return None
            deadline = Deadline(receive.offer.deadline_seconds)
            self._receiver.connect(receive, deadline)
            (segment,) = receive.offer.segments
            channel = self._receiver._channels[segment.model, segment.index, segment.part]
            channel.ready()
            if way == "raw":
                size = max(message_bytes(b) for b in segment.buckets)
                if self._receiver._buffers[0] is None or self._receiver._buffers[0].numel() < size:
                    self._receiver._buffers[0] = torch.empty(size, dtype=torch.uint8)
                for bucket in segment.buckets:
                    channel.broadcast(self._receiver._buffers[0][: message_bytes(bucket)], deadline).wait()
                return None

            def tensors() -> Iterator[tuple[str, torch.Tensor]]:
                for bucket in segment.buckets:
                    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
                        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                        channel.broadcast(tensor.view(-1).view(torch.uint8), deadline).wait()
                        yield name, tensor

            self.model.load_weights(tensors())
            return None

    WeightTransferEngineFactory.register_engine("bench", Engine)
    sys.exit(serve_main([]))


def start(name: str, run_dir: Path) -> tuple[str, str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = ProcessEnv(
        job="bench",
        name=name,
        run_dir=run_dir,
        coordinator="http://127.0.0.1:9",
        token=TOKEN,
        host="127.0.0.1",
        port=port,
        metrics_port=0,
        group="rollout",
        rank=0,
        world_size=1,
    )
    process = multiprocessing.get_context("fork").Process(target=serve, args=(env,))
    process.start()
    return name, f"http://127.0.0.1:{port}", process


def wait_healthy(url: str, process: Any, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.is_alive():
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{url} is not healthy after {seconds} s")


# ---------------------------------------------------------------- sending end


def measure(servers: list[tuple[str, str]], config: Any, rounds: int) -> dict[str, dict[str, float]]:
    import aiohttp
    import torch
    from transformers import LlamaForCausalLM

    from dovetail.coordinator.workers.offers import push_offer
    from dovetail.models.links.deadline import Deadline
    from dovetail.models.transfer import Channel, Part, message_bytes
    from dovetail.trainer.weight_sender import WeightSender

    torch.manual_seed(0)
    state = LlamaForCausalLM(config).float().state_dict()
    way = ""

    class Sender(WeightSender):
        def _stream(self, model: str, parts: Iterator[Part], channel: Channel, deadline: Deadline) -> int:
            if way in ("sent", "ours"):
                return super()._stream(model, parts, channel, deadline)
            plan = self._mine(model) or []
            self._allocate(max(message_bytes(b) for b in plan))
            if way == "raw":
                for bucket in plan:
                    channel.broadcast(self._buffers[0][: message_bytes(bucket)], deadline).wait()
            else:
                for part in parts:
                    channel.broadcast(part.tensor.contiguous().view(-1).view(torch.uint8), deadline).wait()
            return sum(b.nbytes for b in plan)

    groups = SimpleNamespace(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        model={"actor": SimpleNamespace(pp_rank=0, dp_rank=0, tp_rank=0)},
        broadcast_json=lambda value: value,
        gather_json=lambda value: [value],
    )
    offers: queue.Queue[Offer] = queue.Queue()
    sender = Sender(groups, offers.put, host="127.0.0.1")  # type: ignore[arg-type]
    receivers = [
        Receiver(name=name, kind="rollout", models=["actor"], rank_offset=i + 1) for i, (name, _) in enumerate(servers)
    ]

    async def push(offer: Offer, new: bool) -> dict[str, str | None]:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            return await push_offer(session, offer, list(zip(receivers, [u for _, u in servers], strict=True)), new)

    samples: dict[str, dict[str, list[float]]] = {w: {"send": [], "total": []} for w in WAYS}
    sent = 0.0
    # The first round makes the communicator and every buffer, and is not counted.
    for number in range(rounds + 1):
        for way in WAYS:
            command = Publish(id="b", version=WAYS[way] + number, epoch=1, receivers=receivers, deadline_seconds=120)
            begin = time.monotonic()
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(sender.publish, command, {"actor": state.items})
                errors = asyncio.run(push(offers.get(timeout=60), number == 0 and way == "raw"))
                metrics = sending.result()
            if any(errors.values()):
                raise RuntimeError(f"{way}: {errors}")
            if number:
                samples[way]["send"].append(metrics["seconds"])
                samples[way]["total"].append(time.monotonic() - begin)
            sent = metrics["bytes"]
    sender.close()
    return {
        w: {"bytes": sent, **{k: min(v) for k, v in parts.items()}, "median_send": statistics.median(parts["send"])}
        for w, parts in samples.items()
    }


def report(results: dict[str, dict[str, float]], path: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "way", "MB", "send s", "GB/s", "share of raw", "total s", "share of raw", title="trainer to two vLLM servers"
    )
    lines = []
    for way, r in results.items():
        r["gigabytes_per_second"] = r["bytes"] / r["send"] / 1e9
        r["share_of_raw_send"] = results["raw"]["send"] / r["send"]
        r["share_of_raw_total"] = results["raw"]["total"] / r["total"]
        r["speedup_over_one_by_one"] = results["one by one"]["send"] / r["send"]
        table.add_row(
            way,
            f"{r['bytes'] / 1e6:.0f}",
            f"{r['send']:.3f}",
            f"{r['gigabytes_per_second']:.2f}",
            f"{r['share_of_raw_send']:.2f}",
            f"{r['total']:.3f}",
            f"{r['share_of_raw_total']:.2f}",
        )
        lines.append(json.dumps({"benchmark": "weights", "way": way, **{k: round(v, 4) for k, v in r.items()}}))
    Console().print(table)
    print("\n".join(lines))
    if path is not None:
        with path.open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
