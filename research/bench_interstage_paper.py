"""RLHFuse's settings (its section 7) through the simulator of inter-stage fusion, beside what the paper says.

A row: seconds of generation and of inference one after the other; the best threshold and speed-up as the paper fuses
(freed at the threshold), and as Dovetail does (an instance without work is free before it); the most any overlap could
give, (generation + inference) / generation. Then the same where inference pads every sample to the longest there may
be, and with inference a given share of the serial stage, whatever makes it as long; how many times the roofline's
inference the paper's speed-ups would take; and the paper's figure 9 again: speed-up by threshold. SEEDS: draws of the
lengths that a row is averaged over (8).

The text of the paper that we have gives no seconds and no shares: figures 7 to 9 are drawings, and the numbers in the
sentences about them are lost. Its 1.2 to 1.4 is of whole iterations and both fusions, training's too."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np

from dovetail.fusion.lengths import Lengths
from dovetail.fusion.profile import StageProfile
from dovetail.fusion.stage import scan

# The paper's cluster, one set of constants for all rows: 256 H100-80GB-SXM (data sheet), 8 a node and an instance.
GPUS, TP = 256, 8
FLOPS, BANDWIDTH = 989e12, 3.35e12  # bfloat16, memory bytes/s
NETWORK = 25e9  # bytes/s of a GPU's network card, for KV caches
# Assumed, not published: share of the peak that a forward pass and a decode step reach, a layer's fixed cost in a
# decode step (two all-reduces and the launches of a dozen kernels).
FORWARD_EFFICIENCY, DECODE_EFFICIENCY = 0.5, 0.6
LAYER_SECONDS = 25e-6
KV_MEMORY = 0.4 * 80e9 * TP
PROMPTS = (32, 256)  # HH-RLHF, uniform; tokens
BATCH = 512
SCANNED = tuple(k / 100 for k in range(5, 100, 5))
SHARES = (0.1, 0.2, 0.3, 0.4)

# What the text at hand says; the figures' own values (7 to 9) are drawings, and the numbers in its sentences are lost.
PAPER_BEST = 0.20  # figure 9, setting not named
PAPER_OVERALL = (1.2, 1.4)  # both fusions against neither, whole iterations
PAPER_TAIL = 0.5  # figure 2: "more than half" of generation is for long-tailed samples
TAIL_SAMPLES = 0.1  # which of them are meant is not said; here the longest tenth


@dataclass(frozen=True)
class Llm:
    """Table 2 of the paper: layers, hidden and intermediate size (three matrices of it), a vocabulary of 32,000."""

    layers: int
    hidden: int
    intermediate: int

    @property
    def parameters(self) -> float:
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate * 0.675) + 64_000 * self.hidden

    @property
    def kv_bytes(self) -> float:
        return 2 * 2 * self.layers * self.hidden


# The intermediate sizes that the table prints, 4 h, would make 17B of 13B with LLaMA's three matrices; LLaMA's own are
# 13824, 17920 and 22016, 0.675 of it on average, which the formula above uses.
MODELS = {"13B": Llm(40, 5120, 20480), "33B": Llm(60, 6656, 26624), "65B": Llm(80, 8192, 32768)}
# Actor (and reference) / critic (and reward). 33B/33B is not among the paper's.
SETTINGS = ("13B/33B", "33B/13B", "33B/33B", "33B/65B", "65B/33B")


def profile(actor: Llm, critic: Llm, context: float) -> StageProfile:
    def step(batch: int) -> float:
        read = 2 * actor.parameters + batch * context * actor.kv_bytes
        memory = read / (TP * BANDWIDTH * DECODE_EFFICIENCY)
        compute = 2 * actor.parameters * batch / (TP * FLOPS * FORWARD_EFFICIENCY)
        return max(memory, compute) + actor.layers * LAYER_SECONDS

    token = 2 / (TP * FLOPS * FORWARD_EFFICIENCY)
    return StageProfile(
        decode=tuple((b, step(b)) for b in (1, 16, 64, 128, 192, 256, 512)),
        prefill_seconds_per_token=token * actor.parameters,
        inference_seconds_per_token=token * (actor.parameters + 2 * critic.parameters),
        max_samples=512,
        kv_tokens=int(KV_MEMORY / actor.kv_bytes),
        kv_transfer_seconds_per_token=actor.kv_bytes / (TP * NETWORK),
    )


@dataclass(frozen=True)
class Measured:
    """Means over the draws, seconds; `fused` by threshold."""

    generation: float
    serial: float
    fused: dict[float, float]
    ours: float
    tail: float

    @property
    def best(self) -> float:
        return min(self.fused, key=self.fused.__getitem__)

    def speedup(self, fraction: float) -> float:
        return self.serial / self.fused[fraction]


def measure(setting: str, tokens: int, seeds: int, share: float | None = None, padded: bool = False) -> Measured:
    """`share`: of the serial stage that inference is made to take. `padded`: it computes every sample at the length of
    the longest prompt and response that there may be."""
    actor, critic = (MODELS[m] for m in setting.split("/"))
    rows, ours = [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        lengths = Lengths.long_tailed(tokens).draw(BATCH, rng).tolist()
        prompts = rng.integers(*PROMPTS, BATCH).tolist()
        thresholds = [int(f * BATCH) for f in SCANNED]
        instance = profile(actor, critic, float(np.mean(prompts) + np.mean(lengths) / 2))
        if padded:
            factor = (PROMPTS[1] + tokens) / float(np.mean(prompts) + np.mean(lengths))
            per_token = factor * instance.inference_seconds_per_token
            instance = replace(instance, inference_seconds_per_token=per_token)
        if share is not None:
            alone = scan(lengths, prompts, [instance] * (GPUS // TP), [None], tokens)[0]
            wanted = alone.generation_seconds * share / (1 - share)
            factor = wanted / (alone.serial_seconds - alone.generation_seconds)
            per_token = factor * instance.inference_seconds_per_token
            instance = replace(instance, inference_seconds_per_token=per_token)
        instances = [instance] * (GPUS // TP)
        found = scan(lengths, prompts, instances, thresholds, tokens, early=False)
        left = next(t for t, remaining in found[0].tail if remaining <= TAIL_SAMPLES * BATCH)
        tail = 1 - left / found[0].generation_end
        rows.append([tail, found[0].generation_seconds, found[0].serial_seconds, *(p.fused_seconds for p in found)])
        ours.append([p.fused_seconds for p in scan(lengths, prompts, instances, [0, *thresholds], tokens)])
    tail, generation, serial, *fused = np.mean(rows, axis=0).tolist()
    by_threshold = dict(zip(SCANNED, fused, strict=True))
    return Measured(generation, serial, by_threshold, float(np.mean(ours, axis=0).min()), tail)


def row(name: str, m: Measured) -> str:
    cells = (m.generation, m.serial - m.generation, m.best, m.speedup(m.best), m.serial / m.ours)
    return f"{name:21}" + "".join(f"{c:>14.2f}" for c in (*cells, m.serial / m.generation))


def main() -> None:
    seeds = int(os.environ.get("SEEDS", "8"))
    print(f"batch {BATCH}, {GPUS // TP} instances of {TP} H100, mean of {seeds} draws")
    low, high = PAPER_OVERALL
    print(f"paper: best threshold about {PAPER_BEST:.0%}; an iteration {low} to {high} times faster by both fusions\n")
    heads = "".join(f"{h:>14}" for h in ("generation s", "inference s", "best at", "speed-up", "ours", "most"))
    print(f"{'actor/critic   tokens':21}" + heads)
    found = {}
    for tokens in (512, 1024, 2048):
        for setting in SETTINGS:
            name = f"{setting:14}{tokens:>7}"
            found[name] = measure(setting, tokens, seeds)
            print(row(name, found[name]), flush=True)
    rooflines = dict(found)
    print("\ninference at the longest length for every sample\n" + " " * 21 + heads)
    for tokens in (512, 1024, 2048):
        for setting in SETTINGS:
            print(row(f"{setting:14}{tokens:>7}", measure(setting, tokens, seeds, padded=True)), flush=True)
    print("\n33B/33B, 1024 tokens, by share of inference in the serial stage\n" + " " * 21 + heads)
    for share in SHARES:
        found[f"{share:.0%}"] = measure("33B/33B", 1024, seeds, share)
        print(row(f"{share:.0%}", found[f"{share:.0%}"]), flush=True)
    print("\nspeed-up by threshold")
    print(" " * 21 + "".join(f"{f:>6.0%}" for f in SCANNED))
    for name, m in found.items():
        print(f"{name:21}" + "".join(f"{m.speedup(f):>6.2f}" for f in SCANNED))
    tails = [m.tail for m in rooflines.values()]
    print(f"\nshare of generation after nine tenths have ended: {min(tails):.0%} to {max(tails):.0%}", end="; ")
    print(f"paper, for long-tailed samples: more than {PAPER_TAIL:.0%}")
    for speedup in PAPER_OVERALL:
        # If all of inference were hidden: generation + inference = speed-up x generation.
        needed = [(speedup - 1) * m.generation / (m.serial - m.generation) for m in rooflines.values()]
        print(
            f"{speedup} times for these two stages takes {min(needed):.1f} to {max(needed):.1f} times the roofline's "
            f"inference, {1 - 1 / speedup:.0%} of the serial stage, all of it hidden"
        )
    errors = [m.best - PAPER_BEST for m in found.values()]
    near = [m.speedup(PAPER_BEST) / m.speedup(m.best) for m in found.values()]
    print(f"\nbest threshold less the paper's: {min(errors):+.0%} to {max(errors):+.0%}")
    print(f"speed-up at the paper's threshold over that at the best: {min(near):.3f} to {max(near):.3f}")


if __name__ == "__main__":
    main()
