"""Programs of scorers."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers.models.llama.modeling_llama  # noqa: F401  once for all processes
from programs.trainer import LLAMA, counts
from worker import PATIENCE, Place

from dovetail.manifest.types import ScratchModel
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.wire import Arrays, pack, unpack
from dovetail.rollout.scoring import scorer
from dovetail.rollout.scoring.forward_passes import HEADS, ModelScorer
from dovetail.rollout.scoring.host_weights import CudaCopies
from dovetail.rollout.scoring.packed_samples import SamplesToScore

TOKEN = "a-test-token"


def refs() -> dict[str, ModelRef]:
    scratch = ScratchModel(architecture="llama", config=LLAMA | {"num_hidden_layers": 4})
    return {name: ModelRef(head=head, scratch=scratch, seed=1) for name, head in HEADS.items()}  # type: ignore[arg-type]


def samples(count: int) -> Arrays:
    """`count` samples of 8 tokens each, in pairs of one prompt."""
    tokens = np.arange(8 * count, dtype=np.int32).reshape(count, 8) % 64
    tokens[1::2, :4] = tokens[::2, :4]
    return {
        "tokens": tokens,
        "prompt_lengths": np.full(count, 4, np.int32),
        "response_lengths": np.full(count, 4, np.int32),
    }


def passes(
    place: Place, devices: int = 1, shared: bool = False, dtype: str = "bfloat16", tokens: int = 16
) -> dict[str, Any]:
    """A scorer scores 8 samples and then 16, in passes of `tokens` tokens. With `shared` its weights are in host
    memory, and go there after each request."""
    places = [torch.device("cuda", k) for k in range(devices)]
    copies = [CudaCopies(each) for each in places] if shared else None
    held = ModelScorer(places, getattr(torch, dtype), max_tokens=tokens * devices, copies=copies)
    held.load(refs())
    found: dict[str, Any] = {"used": [], "kept": []}
    for size in (8, 8, 16):
        arrays = SamplesToScore.read(samples(size))
        before = counts()
        scores = held.score(list(HEADS), arrays)
        found["used"].append({name: value - before[name] for name, value in counts().items()})
        assert scores["ref_logprobs"].shape == scores["values"].shape == (size, 4)
        if shared:
            held.leave()
        found["kept"].append([torch.cuda.memory_reserved(each) for each in places])
    return found


def process(place: Place, split: int = 1, shared: bool = False, fails: bool = False) -> Any:
    """Rank 0 is the scorer's process, which the job's files configure; rank 1 asks it to load, score, leave, bring and
    score again, then ends it. `fails`: the GPU fails when it scores first."""
    if place.rank == 1:
        return ask(place, fails)
    if fails:
        score = ModelScorer.score

        def fail(*given: Any, **named: Any) -> Any:
            ctypes.CDLL(None).fail(b"an uncorrectable ECC error")
            return score(*given, **named)

        ModelScorer.score = fail  # type: ignore[method-assign]
    pod = {"product": "NVIDIA-A100-SXM4-80GB", "perPod": max(1, split)}
    group = {"name": "rollouts", "roles": ["rollout"], "gpu": pod, "vllmArgs": ["--enable-sleep-mode"] * shared}
    models = {"actor": {"source": {"scratch": {"architecture": "llama", "config": LLAMA}}}}
    spec = {"models": models, "groups": [{"name": "trainers", "roles": ["trainer"], "gpu": pod}, group]}
    document = {"apiVersion": "dovetail.dev/v1beta1", "kind": "RLHFJob", "metadata": {"name": "tiny"}, "spec": spec}
    (place.folder / "job.json").write_text(json.dumps(document))
    rollout = {"name": "rollouts-0", "group": "rollouts", "split": dict.fromkeys(HEADS, split) if split > 1 else {}}
    plan = {"world_size": 1, "parallelism": {}, "batching": [], "tasks": [], "trainers": [], "rollouts": [rollout]}
    (place.folder / "plan.json").write_text(json.dumps(plan))
    os.environ |= ProcessEnv(
        job="tiny",
        name="rollouts-0-scorer",
        run_dir=place.folder,
        coordinator=f"http://127.0.0.1:{place.port}/nobody",
        token=TOKEN,
        host="127.0.0.1",
        port=place.port,
        metrics_port=0,
        group="rollouts",
        rank=0,
        world_size=1,
    ).write()
    (place.folder / "pid").write_text(str(os.getpid()))
    return scorer.main([])


def ask(place: Place, fails: bool) -> dict[str, Any]:
    """What the scorer answers. `fails`: only the status of a request to score, and what it says."""

    def request(path: str, body: bytes | None = None) -> bytes:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        asked = urllib.request.Request(f"http://127.0.0.1:{place.port}{path}", data=body, headers=headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            found: bytes = answer.read()
        return found

    end = time.monotonic() + PATIENCE
    while True:
        try:
            request("/healthz")
            break
        except urllib.error.URLError:
            assert time.monotonic() < end
            time.sleep(0.05)
    models = {"models": {name: ref.model_dump(mode="json") for name, ref in refs().items()}}
    info = json.loads(request("/v1/load", json.dumps(models).encode()))
    score = f"/v1/score?want={','.join(HEADS)}"
    if fails:
        try:
            request(score, pack(samples(8)))
        except urllib.error.HTTPError as error:
            return {"status": error.code, "text": error.read().decode()}
    scored = unpack(request(score, pack(samples(8))))
    request("/v1/leave", b"")
    brought = json.loads(request("/v1/bring", b""))["models"]
    again = unpack(request(score, pack(samples(8))))
    request("/v1/leave", b"")
    os.kill(int(Path(place.folder / "pid").read_text()), signal.SIGTERM)
    return {
        "info": info,
        "brought": brought,
        "shapes": {name: list(each.shape) for name, each in scored.items()},
        "logprobs": float(scored["ref_logprobs"].sum()),
        "same": all(np.array_equal(again[name], each) for name, each in scored.items()),
    }
