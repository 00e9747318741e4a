"""Scoring the samples of GRPO, several to a prompt: each prompt computed once, or for every sample.

    python benchmarks/bench_scoring.py [--prompts 8] [--samples 8] [--prompt-tokens 128] [--responses 32 128]

Reference and reward model of a float32 Llama on this machine's CPU, three ways in turn:

- padded: every sample is a row, padded to a width that it shares with the others of its pass, and logits are computed
  everywhere (how the scorer worked before prompts were shared);
- apart: today's scorer, which is asked for one sample of each prompt at a time, so that no two of a prompt meet;
- shared: today's scorer, asked for all at once.

The last two must give the same bits, the first nearly the same numbers. Prints a table, then one line of JSON for each
way: `tokens` that went through each model, median `cpu_seconds` of the rounds, `speedup` over padded."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from dovetail.manifest.types import ScratchModel
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.wire import Arrays
from dovetail.rollout.scoring.forward_passes import HEADS, Model, ModelScorer
from dovetail.rollout.scoring.packed_samples import SamplesToScore

WANT: tuple[Model, ...] = ("reference", "reward")
VOCABULARY = 8192
WIDTH = 16
PADDED_TOKENS = 8192


def scorer_of(hidden: int, layers: int, positions: int, work: Counter[str]) -> ModelScorer:
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
    }
    scorer = ModelScorer(progress=lambda model, tokens: work.update({model: tokens}))
    refs = {name: ModelRef(head=HEADS[name], scratch=ScratchModel(config=config), seed=1) for name in WANT}  # type: ignore[arg-type]
    scorer.load(refs)
    # A new value head is zero.
    torch.nn.init.normal_(scorer.require("reward").stages[-1].score.weight, generator=torch.Generator().manual_seed(2))
    return scorer


def batch(prompts: int, samples: int, prompt_tokens: int, responses: tuple[int, int]) -> SamplesToScore:
    """Prompt after prompt, response lengths uniform within `responses`."""
    g = np.random.default_rng(0)
    lengths = g.integers(responses[0], responses[1] + 1, prompts * samples)
    tokens = g.integers(0, VOCABULARY, (prompts * samples, prompt_tokens + responses[1]))
    starts = g.integers(0, VOCABULARY, (prompts, prompt_tokens))
    tokens[:, :prompt_tokens] = starts.repeat(samples, axis=0)
    return SamplesToScore(tokens, np.full(prompts * samples, prompt_tokens), lengths)


def padded(scorer: ModelScorer, batch: SamplesToScore, work: Counter[str]) -> Arrays:
    """Passes of rows of one width, the longest first."""
    widths = -(-batch.lengths // WIDTH) * WIDTH
    logprobs = np.zeros((len(widths), int(batch.responses.max())), np.float32)
    scores = np.zeros(len(widths), np.float32)
    tokens = np.pad(batch.tokens, ((0, 0), (0, WIDTH)))
    with torch.inference_mode():
        for width in sorted(set(widths.tolist()), reverse=True):
            alike, most = np.flatnonzero(widths == width), max(1, PADDED_TOKENS // width)
            for rows in np.split(alike, range(most, len(alike), most)):
                block = torch.from_numpy(tokens[rows, :width])
                logits = scorer.require("reference").stages[0](block)
                values = scorer.require("reward").stages[0](block)
                work.update(dict.fromkeys(WANT, block.numel()))
                for b, row in enumerate(rows):
                    p, r = int(batch.prompts[row]), int(batch.responses[row])
                    found = torch.log_softmax(logits[b, p - 1 : p + r - 1], dim=1)
                    logprobs[row, :r] = found.gather(1, block[b, p : p + r, None])[:, 0].numpy()
                    scores[row] = float(values[b, p + r - 1])
    return {"ref_logprobs": logprobs, "scores": scores}


def one_by_one(scorer: ModelScorer, batch: SamplesToScore, samples: int) -> Arrays:
    logprobs = np.zeros((len(batch.tokens), int(batch.responses.max())), np.float32)
    scores = np.zeros(len(batch.tokens), np.float32)
    for first in range(samples):
        rows = np.arange(first, len(batch.tokens), samples)
        found = scorer.score(WANT, SamplesToScore(batch.tokens[rows], batch.prompts[rows], batch.responses[rows]))
        logprobs[rows, : found["ref_logprobs"].shape[1]] = found["ref_logprobs"]
        scores[rows] = found["scores"]
    return {"ref_logprobs": logprobs, "scores": scores}


def main(argv: list[str] | None = None) -> int:
    """Run, and print. 1 if the ways differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--responses", type=int, nargs=2, default=(32, 128), help="fewest and most tokens")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    work: Counter[str] = Counter()
    scorer = scorer_of(options.hidden, options.layers, options.prompt_tokens + options.responses[1] + WIDTH, work)
    whole = batch(options.prompts, options.samples, options.prompt_tokens, tuple(options.responses))
    ways: dict[str, Callable[[], Arrays]] = {
        "padded": lambda: padded(scorer, whole, work),
        "apart": lambda: one_by_one(scorer, whole, options.samples),
        "shared": lambda: scorer.score(WANT, whole),
    }
    tokens, results = {}, {}
    for way, run in ways.items():  # not measured
        work.clear()
        results[way] = run()
        tokens[way] = work["reference"]
    for name in ("ref_logprobs", "scores"):
        if not np.array_equal(results["apart"][name], results["shared"][name]):
            print(f"error: {name} depend on a sample's company", file=sys.stderr)
            return 1
        if not np.allclose(results["padded"][name], results["shared"][name], atol=1e-4):
            print(f"error: {name} differ from those of padded rows", file=sys.stderr)
            return 1
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, run in ways.items():
            began = time.process_time()
            run()
            seconds[way].append(time.process_time() - began)
    report(options, tokens, {way: statistics.median(taken) for way, taken in seconds.items()})
    return 0


def report(options: argparse.Namespace, tokens: dict[str, int], seconds: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("way", "tokens a model", "CPU s", "speed-up", title="scoring GRPO's samples")
    for way, taken in seconds.items():
        table.add_row(way, str(tokens[way]), f"{taken:.2f}", f"{seconds['padded'] / taken:.2f}")
    Console().print(table)
    for way, taken in seconds.items():
        result = {
            "benchmark": "scoring",
            "way": way,
            "prompts": options.prompts,
            "samples": options.samples,
            "prompt_tokens": options.prompt_tokens,
            "tokens": tokens[way],
            "cpu_seconds": round(taken, 3),
            "speedup": round(seconds["padded"] / taken, 3),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
