"""What it costs the coordinator when all trainer ranks ask for a batch at once.

Real preparation of data, real files and routes, in this process. RANKS (64) emulated ranks in another process ask for
one step of SFT of about SFT_TOKENS (90000) tokens, and then for a batch of PPO with SAMPLES (4096) samples whose
lengths have a long tail (mean 3,000 tokens of response, at most 32,768): rank 0 for the log-probabilities and values
of all samples, the others for their own rows.

Prints a JSON line for each part. `turn_ms`: CPU time of the longest turn of the event loop, in which it answers nobody.
`cpu_seconds` are those of this process, all threads. `peak_mb`: how far its memory rose."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from bench_coordinator import begin_peak, resident, watch_turns
from prometheus_client import CollectorRegistry

from dovetail.coordinator.data.prepare import prepare
from dovetail.coordinator.serving.coordinator_routes import make_app
from dovetail.coordinator.serving.served_batches import Batches
from dovetail.coordinator.store.experience_files import ExperienceFiles, experience_arrays
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.http import serving

TOKEN, PROMPT = "token", 128
RANKS, SAMPLES = int(os.environ.get("RANKS", "64")), int(os.environ.get("SAMPLES", "4096"))
SFT_TOKENS = int(os.environ.get("SFT_TOKENS", "90000"))
TABLES = ["rollout_logprobs", "ref_logprobs", "values"]


def ask(port: int, key: str, answers: Any) -> None:
    """The ranks: each asks for its part, reads it, and keeps nothing."""

    async def rank(number: int, session: aiohttp.ClientSession) -> int:
        url, size = f"http://127.0.0.1:{port}/v1/batches/{key}", 0
        requests: list[dict[str, Any] | None] = [None]
        if key.startswith("ppo"):
            whole = TABLES if number == 0 else []
            some = ["tokens", *(name for name in TABLES if name not in whole)]
            order = np.random.default_rng(0).permutation(SAMPLES)
            requests = [{}, {"rows": sorted(order[number::RANKS].tolist()), "some": some, "whole": whole}]
        for body in requests:
            sent = session.get(url) if body is None else session.post(url, json=body)
            async with sent as reply:
                reply.raise_for_status()
                async for piece in reply.content.iter_chunked(1 << 20):
                    size += len(piece)
        return size

    async def ranks() -> int:
        options: dict[str, Any] = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(None)}
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}, **options) as session:
            return sum(await asyncio.gather(*(rank(number, session) for number in range(RANKS))))

    answers.send(asyncio.run(ranks()))


class Costs:
    """What this process spends between `begin` and `end`."""

    def __init__(self) -> None:
        self._turns: list[float] = []
        watch_turns(self._turns)

    def begin(self) -> None:
        self._memory, self._cpu, self._clock = begin_peak(), time.process_time(), time.perf_counter()
        self._turns.clear()

    def end(self) -> dict[str, float]:
        return {
            "seconds": round(time.perf_counter() - self._clock, 2),
            "cpu_seconds": round(time.process_time() - self._cpu, 2),
            "turn_ms": round(1000 * max(self._turns, default=0.0), 1),
            "peak_mb": round((resident("VmHWM") - self._memory) / 1e6, 1),
        }


def manifest(folder: Path) -> RLHFJobSpec:
    """Two steps of SFT, each of 128 texts and about SFT_TOKENS tokens."""
    random, words = np.random.default_rng(0), [f"word{i}" for i in range(2000)]
    rows = []
    for _ in range(300):
        text = " ".join(words[i] for i in random.integers(0, len(words), SFT_TOKENS // 128 // 2))
        rows.append({"prompt": text[: len(text) // 4], "response": text[len(text) // 4 :]})
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return RLHFJobSpec.model_validate(
        {
            "stages": ["sft"],
            "models": {
                "actor": {"source": {"scratch": {"config": config}}},
                "tokenizer": {"train": {"vocabSize": 2400}},
            },
            "data": {"demonstrations": [{"path": "texts.jsonl"}], "maxTokens": 4096, "maxPromptTokens": 2048},
            "sft": {"batchSize": 128, "steps": 2},
            "groups": [{"name": "all", "roles": ["trainer"]}],
        }
    )


def samples() -> list[Any]:
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(np.log(3000) - 0.5, 1.0, SAMPLES), 8, 32768).astype(int)
    lengths[0] = 32768
    made = []
    for i, length in enumerate(lengths.tolist()):
        numbers = random.standard_normal(length).astype(np.float32)
        tables = dict.fromkeys(("logprobs", "ref_logprobs", "values"), numbers)
        tokens = {"prompt_tokens": np.zeros(PROMPT, np.int32), "tokens": np.ones(length, np.int32)}
        key = SimpleNamespace(prompt=i // 8)
        made.append(SimpleNamespace(**tokens, **tables, reward=1.0, key=key, finished=True))
    return made


async def serve(folder: Path) -> None:
    costs, store = Costs(), {}

    def told(part: str, **more: Any) -> None:
        print(json.dumps({"benchmark": f"batches, {part}", "ranks": RANKS, **more}), flush=True)

    costs.begin()
    prepared = await asyncio.to_thread(prepare, manifest(folder), folder / "run", folder)
    if hasattr(prepared, "tokenise"):
        await asyncio.to_thread(prepared.tokenise)
    tokens = int(prepared.sft_batch(1)["lengths"].sum())
    told("prepare", **costs.end())
    files, made = ExperienceFiles(folder / "run"), samples()
    await asyncio.sleep(0)
    costs.begin()
    arrays: Any = await asyncio.to_thread(experience_arrays, made, 0)
    store["ppo/1/batch"] = await asyncio.to_thread(files.write, 1, arrays)
    size = (folder / "run/experience/000001.safetensors").stat().st_size
    told("build", samples=SAMPLES, tokens=sum(len(s.tokens) for s in made), file_mb=round(size / 1e6, 1), **costs.end())
    del arrays, made
    records: Any = SimpleNamespace(get=store.get, items=lambda _: {})
    batches = Batches(prepared, files, records)
    host: Any = SimpleNamespace(batch=batches.fetch)
    runner = serving.Runner(make_app(host, TOKEN, CollectorRegistry()))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    context = multiprocessing.get_context("spawn")
    for key, more in (("sft/2", {"tokens": tokens}), ("ppo/1", {"samples": SAMPLES})):
        ours, theirs = context.Pipe()
        process = context.Process(target=ask, args=(port, key, theirs), daemon=True)
        costs.begin()
        process.start()
        theirs.close()
        sent = await asyncio.to_thread(ours.recv)
        told(key, sent_mb=round(sent / 1e6, 1), **more, **costs.end())
        await asyncio.to_thread(process.join)
    await runner.cleanup()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(Path(folder)))


if __name__ == "__main__":
    main()
