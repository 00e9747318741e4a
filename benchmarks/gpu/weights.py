"""Measures weight transfers. Weights are packed with a checksum, sent to another process on the same GPU, and copied to
the host while training."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from dovetail.models.transfer import checksum, intact, message_bytes, pack_into
from dovetail.protocol.weights.buckets import GPU_BUCKET_BYTES, TensorSpec, plan_buckets
from gpu import device
from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import by_clock, on_device

ANSWER_SECONDS = 90.0


def run(scale: Scale, report: Report) -> None:
    # The other process is forked before this one uses CUDA.
    ours, theirs = multiprocessing.Pipe()
    peer = multiprocessing.get_context("fork").Process(target=_receive, args=(theirs,), daemon=True)
    peer.start()
    theirs.close()  # so that the other process's death is seen
    _packed(scale, report)
    _while_training(scale, report)
    _to_peer(scale, report, ours)
    peer.kill()


def _packed(scale: Scale, report: Report) -> None:
    bandwidth = report.device[device.MEMORY]
    size = min(GPU_BUCKET_BYTES, scale.copied)
    hidden, inner = scale.config["hidden_size"], scale.config["intermediate_size"]
    tensors = [torch.randn(inner, hidden, device="cuda") for _ in range(max(1, size // (4 * hidden * inner)))]
    specs = [TensorSpec(str(i), "float32", tuple(t.shape)) for i, t in enumerate(tensors)]
    (bucket, *_) = plan_buckets(specs, 2 * size)
    message = torch.empty(message_bytes(bucket), dtype=torch.uint8, device="cuda")
    some = tensors[: len(bucket.names)]
    sent = bucket.nbytes
    note = f"a bucket of {sent / 2**20:.0f} MiB"
    seconds = on_device(lambda: pack_into(message, bucket, some), 10)
    report.add("pack with a checksum", 3 * sent / seconds / 1e9, "GB/s", "memory bandwidth", bandwidth, note)
    seconds = on_device(lambda: checksum(message[:sent]), 10)
    report.add("checksum", sent / seconds / 1e9, "GB/s", "memory bandwidth", bandwidth, note)
    seconds = by_clock(lambda: intact(message, bucket), 5)
    report.add("checksum compared", sent / seconds / 1e9, "GB/s", "memory bandwidth", bandwidth, "the host waits")


def _while_training(scale: Scale, report: Report) -> None:
    """Measure page-locked copies on a stream of their own, beside matrix products."""
    left = torch.randn(scale.product, scale.product, device="cuda").to(torch.bfloat16)
    there = torch.randn(scale.copied // 4, device="cuda")
    host = torch.empty(scale.copied // 4, pin_memory=True)
    beside = torch.cuda.Stream()

    def products() -> None:
        for _ in range(20):
            left @ left

    def copy(to_host: bool) -> None:
        with torch.cuda.stream(beside):
            (host.copy_ if to_host else there.copy_)(there if to_host else host, non_blocking=True)

    alone = by_clock(products, 3)
    for to_host, name in ((True, "to the host"), (False, "from the host")):
        copied = by_clock(lambda to_host=to_host: copy(to_host), 3)

        def both(to_host: bool = to_host) -> None:
            copy(to_host)
            products()

        together = by_clock(both, 3)
        longest = max(alone, copied)
        report.add(f"a copy {name} beside training", 1e3 * together, "ms", "the longer one alone", 1e3 * longest)


# ------------------------------------------------------------ CUDA IPC


def _to_peer(scale: Scale, report: Report, peer: Connection) -> None:
    name = "CUDA IPC to a process on the same GPU"
    source = torch.full((scale.copied,), 7, dtype=torch.uint8, device="cuda")
    try:
        from torch.multiprocessing.reductions import reduce_tensor

        start = time.perf_counter()
        peer.send(reduce_tensor(source))
        answer = _answer(peer)
    except EOFError:
        report.skip(name, "the other process died of it")
        return
    except (RuntimeError, OSError) as problem:
        report.skip(name, str(problem).splitlines()[0])
        return
    if isinstance(answer, str):
        report.skip(name, answer)
        return
    opened, seconds, value = answer
    rate = 2 * source.nbytes / max(seconds, 1e-9) / 1e9
    note = (
        f"handle sent, opened and copied in {1e3 * (time.perf_counter() - start):.0f} ms; opened in {1e3 * opened:.1f}"
    )
    report.add(name, rate, "GB/s", "memory bandwidth", report.device[device.MEMORY], note + _wrong(value))


def _wrong(value: int) -> str:
    return "" if value == 7 else f"; WRONG VALUE {value}, expected 7"


def _answer(peer: Connection) -> Any:
    if not peer.poll(ANSWER_SECONDS):
        raise RuntimeError(f"the other process did not answer within {ANSWER_SECONDS:.0f} s")
    return peer.recv()


def _receive(connection: Connection) -> None:
    """Run the other process. It opens the memory that is sent, and copies it into its own memory."""
    try:
        rebuild, arguments = connection.recv()
        torch.cuda.init()
        start = time.perf_counter()
        shared = rebuild(*arguments)
        opened = time.perf_counter() - start
        mine = torch.empty_like(shared)
        seconds = on_device(lambda: mine.copy_(shared), 5)
        connection.send((opened, seconds, int(mine[-1])))
    except Exception as problem:
        connection.send(f"{type(problem).__name__}: {problem}".splitlines()[0])
    connection.recv()
