"""GAE as a matrix product and the other hot algorithms, each against its plain form, in one run.

    python -m benchmarks.bench_gae [--quick]

Prints a table, and one JSON line per measurement: {"algorithm", "shape", "threads", "ours_ms", "plain_ms",
"ratio", "max_error"}. Ours and the plain form run alternately; times are medians. Threads: torch's default
(OMP_NUM_THREADS)."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dovetail.models.layers.logprobs import gather_logprobs
from dovetail.trainer.algorithms.advantages import gae, grpo, whiten
from dovetail.trainer.packed_batches import partition

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.recursive_gae import gae_recursive

SHAPES = [(512, 1024), (1024, 1024), (2048, 2048), (4096, 4096)]
ROUNDS = 5


@dataclass(frozen=True)
class Measurement:
    """Medians in milliseconds; ratio = plain / ours; max_error: largest absolute difference of the results."""

    algorithm: str
    shape: str
    threads: int
    ours_ms: float
    plain_ms: float
    ratio: float
    max_error: float


def measure(name: str, shape: str, ours: Callable[[], Tensor], plain: Callable[[], Tensor], rounds: int) -> Measurement:
    """Alternate the two, after one unmeasured call of each, whose results are compared."""
    a, b = ours(), plain()
    error = float((a.double() - b.double()).abs().max())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for function, into in ((ours, times[0]), (plain, times[1])):
            start = time.perf_counter()
            function()
            into.append(1e3 * (time.perf_counter() - start))
    fast, slow = statistics.median(times[0]), statistics.median(times[1])
    return Measurement(
        name, shape, torch.get_num_threads(), round(fast, 3), round(slow, 3), round(slow / fast, 2), error
    )


# ---------------------------------------------------------------- plain forms


def plain_whiten(x: Tensor, mask: Tensor) -> Tensor:
    kept = x[mask].double()
    return torch.where(mask, (x.double() - kept.mean()) / (kept.var() + 1e-8).sqrt(), 0.0).float()


def plain_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-softmax of everything in float32, then a gather, and the gradient of the sum."""
    x = logits.detach().requires_grad_()
    table = torch.log_softmax(x.float(), dim=-1)
    table.gather(-1, tokens.unsqueeze(-1)).sum().backward()
    assert x.grad is not None
    return x.grad


def our_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    x = logits.detach().requires_grad_()
    gather_logprobs(x, tokens).sum().backward()
    assert x.grad is not None
    return x.grad


def plain_grpo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Group by group."""
    result = torch.zeros(len(scores), dtype=torch.float64)
    for group in groups.unique().tolist():
        members = groups == group
        s = scores[members].double()
        result[members] = (s - s.mean()) / (s.std() + 1e-6)
    return result.float().unsqueeze(1) * mask


def greedy_partition(lengths: list[int], k: int) -> list[list[int]]:
    """Longest first into the lightest group."""
    groups: list[list[int]] = [[] for _ in range(k)]
    sums = [0] * k
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        lightest = sums.index(min(sums))
        groups[lightest].append(i)
        sums[lightest] += lengths[i]
    return groups


def heaviest(lengths: list[int], groups: list[list[int]]) -> Tensor:
    return torch.tensor([max(sum(lengths[i] for i in g) for g in groups)], dtype=torch.float64)


# ---------------------------------------------------------------- runs


def batch_of(batch: int, time_: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a right-padded mask with long-tailed lengths, as chat responses have."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.empty(batch, 1).exponential_(4 / time_, generator=g).clamp(1, time_)
    mask = torch.arange(time_) < lengths
    return torch.randn(batch, time_, generator=g), torch.randn(batch, time_, generator=g), mask


def run(quick: bool) -> list[Measurement]:
    results = []
    rounds = 3 if quick else ROUNDS
    for batch, time_ in SHAPES[:1] if quick else SHAPES:
        shape = f"{batch}x{time_}"
        rewards, values, mask = batch_of(batch, time_)
        results.append(
            measure(
                "gae",
                shape,
                lambda r=rewards, v=values, m=mask: gae(r, v, m, 1.0, 0.95)[0],  # type: ignore[misc]
                lambda r=rewards, v=values, m=mask: gae_recursive(r, v, m, 1.0, 0.95)[0],  # type: ignore[misc]
                rounds,
            )
        )
        holes = mask & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) > 0.1)
        results.append(
            measure(
                "gae, mask with holes",
                shape,
                lambda r=rewards, v=values, m=holes: gae(r, v, m, 1.0, 0.95)[0],  # type: ignore[misc]
                lambda r=rewards, v=values, m=holes: gae_recursive(r, v, m, 1.0, 0.95)[0],  # type: ignore[misc]
                rounds,
            )
        )
        results.append(
            measure(
                "whiten",
                shape,
                lambda v=values, m=mask: whiten(v, m),  # type: ignore[misc]
                lambda v=values, m=mask: plain_whiten(v, m),  # type: ignore[misc]
                rounds,
            )
        )
    samples = 512 if quick else 4096
    g = torch.Generator().manual_seed(2)
    scores, groups = torch.randn(samples, generator=g), torch.arange(samples, dtype=torch.int32) // 8
    ones = torch.ones(samples, 64)
    results.append(
        measure(
            "grpo, groups of 8",
            f"{samples}x64",
            lambda: grpo(scores, groups, ones),
            lambda: plain_grpo(scores, groups, ones),
            rounds,
        )
    )
    for rows, vocabulary, dtype in (
        [(256, 8192, torch.float32)] if quick else [(2048, 32768, torch.float32), (2048, 32768, torch.bfloat16)]
    ):
        logits = torch.randn(1, rows, vocabulary, generator=g).to(dtype)
        tokens = torch.randint(0, vocabulary, (1, rows), generator=g)
        name = f"log-probabilities, forward and backward, {str(dtype).removeprefix('torch.')}"
        results.append(
            measure(
                name,
                f"{rows}x{vocabulary}",
                lambda x=logits, t=tokens: our_logprobs(x, t),  # type: ignore[misc]
                lambda x=logits, t=tokens: plain_logprobs(x, t),  # type: ignore[misc]
                rounds,
            )
        )
    lengths = np.random.default_rng(0).exponential(256, samples).astype(int).clip(1, 4096).tolist()
    results.append(
        measure(
            "balance, 16 ranks (plain: greedy)",
            f"{samples}",
            lambda: heaviest(lengths, partition(lengths, 16)),
            lambda: heaviest(lengths, greedy_partition(lengths, 16)),
            rounds,
        )
    )
    return results


def main(argv: list[str] | None = None) -> int:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes only")
    results = run(parser.parse_args(argv).quick)
    table = Table("algorithm", "shape", "ours, ms", "plain, ms", "plain / ours", "max |difference|")
    for m in results:
        table.add_row(
            m.algorithm,
            m.shape,
            f"{m.ours_ms:.2f}",
            f"{m.plain_ms:.2f}",
            f"{m.ratio:.1f}",
            f"{m.max_error:.1e}",
        )
    Console(width=120, file=sys.stdout).print(table)
    for m in results:
        print(json.dumps(asdict(m)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
