"""Generation and inference one after the other against fused (RLHFuse section 4 and figure 9), by threshold.

    python benchmarks/bench_interstage.py [--instances 4 8 16 32] [--share 0.3] [--fractions ...] [--whole]
    python benchmarks/bench_interstage.py --real [--seeds 3] [--fractions ...]

Without --real: the coordinator's own code and protocols over emulated instances that wait as long as a profile says:
LLaMA-33B on eight H100 each, 16 samples an instance, at most 1024 tokens, lengths
log-normal with the median an eighth of the longest, means over several draws of them. The simulator predicts from what
the coordinator has measured until then, as in a job that has begun with two iterations of other lengths. Reference,
reward and critic take a given share of the serial stage. Scorers look at unfinished samples too; with --whole they do
not. Everything takes --slow times as long as there, against the
noise of a busy machine. With --real: two vLLM servers and scorers on this machine's cores, model and lengths of
bench_e2e.py.

A JSON line a measurement: `threshold` (samples; null: serial), `fraction`, `serial_seconds` (of the same run), and
`fused_seconds`, their ratio `speedup`, the simulator's `predicted_speedup`, and `gap_share`: how long a migrated sample
stood still, of the stage; `left_share`: the inference after the last token, of the stage; a last line says what the
controller chose, and how far predictions were off."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from interstage.stage import Measured, Rule, alike, decided, emulated, instances, learn, lengths_of, measure, memory

from dovetail.coordinator.samples.fusion.threshold import Decision, ThresholdController
from dovetail.coordinator.store.samples import NewSample
from dovetail.fusion.profile import StageProfile
from dovetail.fusion.stage import StagePrediction, scan
from dovetail.protocol.budgets import RESPONSE_BLOCK

PROMPT, MAX_TOKENS, SAMPLES = 128, 1024, 16
FRACTIONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
LEARNT = 5
# Eight H100-80GB-SXM (data sheet): bfloat16, memory bytes/s, bytes/s of a GPU's network card, bytes for KV caches.
TP, FLOPS, BANDWIDTH, NETWORK, KV_MEMORY = 8, 989e12, 3.35e12, 25e9, 0.4 * 80e9 * 8
# Assumed: the share of the peak that a forward pass and a decode step reach, and a layer's fixed cost in a decode step
# (two all-reduces and the launches of a dozen kernels).
FORWARD_EFFICIENCY, DECODE_EFFICIENCY, LAYER_SECONDS = 0.5, 0.6, 25e-6
# LLaMA-33B: layers, hidden size, and parameters with three matrices of 2.7 times the hidden size and two embeddings.
LAYERS, HIDDEN = 60, 6656
PARAMETERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * 26624 * 0.675) + 64_000 * HIDDEN
KV_BYTES = 2 * 2 * LAYERS * HIDDEN


def profile(context: float) -> StageProfile:
    """LLaMA-33B as all models, at the mean length `context` in tokens."""

    def step(batch: int) -> float:
        memory = (2 * PARAMETERS + batch * context * KV_BYTES) / (TP * BANDWIDTH * DECODE_EFFICIENCY)
        compute = 2 * PARAMETERS * batch / (TP * FLOPS * FORWARD_EFFICIENCY)
        return max(memory, compute) + LAYERS * LAYER_SECONDS

    token = 2 / (TP * FLOPS * FORWARD_EFFICIENCY)
    return StageProfile(
        decode=tuple((b, step(b)) for b in (1, 16, 64, 128, 192, 256, 512)),
        prefill_seconds_per_token=token * PARAMETERS,
        inference_seconds_per_token=token * (PARAMETERS + 2 * PARAMETERS),
        max_samples=512,
        kv_tokens=int(KV_MEMORY / KV_BYTES),
        kv_transfer_seconds_per_token=KV_BYTES / (TP * NETWORK),
    )


def device(share: float, slow: float, lengths: Sequence[int], count: int) -> StageProfile:
    """LLaMA-33B on eight H100, `slow` times slower, inference scaled to `share` of the serial stage."""
    fast = profile(PROMPT + float(np.mean(lengths)) / 2)
    found = replace(
        fast,
        decode=tuple((batch, slow * seconds) for batch, seconds in fast.decode),
        prefill_seconds_per_token=slow * fast.prefill_seconds_per_token,
        inference_seconds_per_token=slow * fast.inference_seconds_per_token,
        kv_transfer_seconds_per_token=None,
    )
    alone = scan(lengths, [PROMPT] * len(lengths), [found] * count, [None], MAX_TOKENS)[0]
    wanted = alone.generation_seconds * share / (1 - share)
    factor = wanted / (alone.serial_seconds - alone.generation_seconds)
    return replace(found, inference_seconds_per_token=factor * found.inference_seconds_per_token)


def choice(count: int, size: int, device: StageProfile, seeds: int) -> Rule:
    """What the controller decides after some iterations of other samples."""
    controller = ThresholdController("Auto", MAX_TOKENS)
    for iteration in range(LEARNT):
        controller.observe(lengths_of(size, MAX_TOKENS, seeds + iteration))
    return rule_of(controller.decide([PROMPT] * size, [device] * count))


def rule_of(decision: Decision) -> Rule:
    return decision.threshold, decision.roomy


@dataclass(frozen=True)
class Stage:
    """One that was run, and what was predicted of it."""

    found: Measured
    predicted: StagePrediction


def emulate(
    count: int, share: float, slow: float, fractions: Sequence[float], seeds: int, blocks: int | None
) -> list[dict[str, Any]]:
    """Means over `seeds` draws of the lengths; all thresholds in turn on each, so that none has a quieter machine."""
    size = SAMPLES * count
    draws = [lengths_of(size, MAX_TOKENS, seed) for seed in range(seeds + 1)]
    one = replace(device(share, slow, draws[0], count), block_tokens=blocks)
    with tempfile.TemporaryDirectory() as folder, memory(Path(folder), MAX_TOKENS, one.max_samples) as fusion:
        known = one

        def stage(ports: Sequence[int], lengths: Sequence[int], rule: Rule) -> Stage:
            nonlocal known
            predicted = scan(lengths, [PROMPT] * size, [known] * count, [rule[0]], MAX_TOKENS, roomy=[rule[1]])[0]
            decision = decided(rule, predicted)
            found = asyncio.run(measure(emulated(ports), alike(size, PROMPT), known, decision, MAX_TOKENS, lengths))
            known = replace(learn(fusion, found), block_tokens=blocks)
            return Stage(found, predicted)

        # A job's first two iterations.
        with instances(one, count, draws[-1], PROMPT) as ports:
            stage(ports, draws[-1], (None, False))
            stage(ports, draws[-1], (size // 5, False))
        chosen = choice(count, size, known, seeds)
        # The paper's rule for destinations.
        rules = swept(fractions, size, False)
        if chosen not in rules:
            rules.append(chosen)
        stages: list[list[Stage]] = []
        for lengths in draws[:-1]:
            with instances(one, count, lengths, PROMPT) as ports:
                stages.append([stage(ports, lengths, rule) for rule in rules])
    return report("emulated", count, rules, size, stages, chosen)


def swept(fractions: Sequence[float], size: int, roomy: bool) -> list[Rule]:
    """Off, then these thresholds."""
    return [(None, False), *((t, roomy and t > 0) for t in dict.fromkeys(int(f * size) for f in fractions))]


def report(
    kind: str,
    count: int,
    rules: Sequence[Rule],
    size: int,
    stages: Sequence[Sequence[Stage]],
    chosen: Rule,
) -> list[dict[str, Any]]:
    """Print and return the lines. `stages`: a row a draw, a column a rule, the serial one first."""
    lines = []
    serial = [row[0] for row in stages]
    for rule, *column in zip(rules, *stages, strict=True):
        lines.append({"measurement": f"interstage {kind}", "instances": count} | means(rule, size, column, serial))
        print(json.dumps(lines[-1]), flush=True)
    lines.append(conclusion(kind, lines, chosen) | {"instances": count, "draws": len(stages)})
    print(json.dumps(lines[-1]), flush=True)
    return lines


def means(rule: Rule, size: int, stages: Sequence[Stage], serial: Sequence[Stage]) -> dict[str, Any]:
    """A line's figures."""
    mean, threshold = statistics.fmean, rule[0]
    alone, seconds = mean(s.found.seconds for s in serial), mean(s.found.seconds for s in stages)
    expected = mean(s.predicted.fused_seconds for s in stages)
    return {
        "threshold": threshold,
        "fraction": None if threshold is None else round(threshold / size, 3),
        "roomy": rule[1],
        "serial_seconds": round(alone, 3),
        "fused_seconds": round(seconds, 3),
        "generation_seconds": round(mean(s.found.generation for s in stages), 3),
        "migrated": round(mean(s.found.migrated for s in stages), 1),
        "gap_share": round(mean(s.found.gap / s.found.seconds for s in stages), 4),
        "left_share": round(mean(1 - s.found.generation / s.found.seconds for s in stages), 4),
        "speedup": round(alone / seconds, 3),
        "predicted_seconds": round(expected, 3),
        "predicted_speedup": round(mean(s.predicted.serial_seconds for s in stages) / expected, 3),
    }


def conclusion(kind: str, lines: Sequence[dict[str, Any]], chosen: Rule) -> dict[str, Any]:
    best = max(lines, key=lambda line: line["speedup"])
    ours = next(line for line in lines if (line["threshold"], line["roomy"]) == chosen)
    off = [abs(line["predicted_seconds"] / line["fused_seconds"] - 1) for line in lines if "predicted_seconds" in line]
    return {
        "measurement": f"interstage {kind} choice",
        "best_threshold": best["threshold"],
        "best_speedup": best["speedup"],
        "chosen_threshold": chosen[0],
        "chosen_roomy": chosen[1],
        "chosen_speedup": ours["speedup"],
        "chosen_gap_share": ours.get("gap_share"),
        "chosen_left_share": ours.get("left_share"),
        "chosen_over_best_seconds": round(ours["fused_seconds"] / best["fused_seconds"], 4),
        "prediction_error_max": round(max(off), 4),
        "prediction_error_median": round(statistics.median(off), 4),
    }


def real(fractions: Sequence[float], rounds: int, count: int = 2) -> None:
    """Two servers and scorers; the same responses for all thresholds of a round, and a first round to learn from."""
    from e2e.model import make_models
    from e2e.settings import Folder, Settings
    from interstage.real import TOKEN, servers
    from transformers import AutoTokenizer

    settings = Settings()
    size = settings.batch
    # As a fraction pinned in the manifest: destinations take what they have room for.
    rules = swept(fractions, size, True)
    controller = ThresholdController("Auto", settings.max_new_tokens)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = Folder(folder / "models")
        make_models(models, settings)
        tokenizer = AutoTokenizer.from_pretrained(models.actor)
        prompts = [tokenizer(text)["input_ids"] for text in models.texts()]
        lengths = [len(p) for p in prompts]
        (folder / "run").mkdir()
        places = stack.enter_context(servers(folder / "run", models, settings, count))
        fusion = stack.enter_context(memory(folder / "memory", settings.max_new_tokens, size))
        known = fusion.measured("g").profile()

        def stage(rule: Rule, number: int, responses: Sequence[int] | None) -> Stage:
            nonlocal known
            samples = [NewSample(i, 0, prompt, 1000 * number + i) for i, prompt in enumerate(prompts)]
            likely, most = responses or [1] * size, settings.max_new_tokens
            expected = scan(likely, lengths, [known] * count, [rule[0]], most, roomy=[rule[1]])[0]
            decision = decided(rule, expected)
            found = asyncio.run(measure(places, samples, known, decision, settings.max_new_tokens, responses, TOKEN))
            known = learn(fusion, found)
            return Stage(found, expected)

        stages: list[list[Stage]] = []
        chosen: Rule = (None, False)
        for number in range(rounds + 1):
            # Whoever is first finds the caches cold: its responses are learnt from, and it is not counted.
            responses = stage((size // 5, True), number, None).found.lengths
            if number == 1:
                chosen = rule_of(controller.decide(lengths, [known] * count))
                if chosen not in rules:
                    rules.append(chosen)
            controller.observe(responses)
            row = [stage(rule, number, responses) for rule in rules]
            if number:
                stages.append(row)
    report("real", count, rules, size, stages, chosen)


def main(argv: list[str] | None = None) -> int:
    """0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--share", type=float, default=0.3, help="of inference in the serial stage")
    parser.add_argument("--slow", type=float, default=1.0, help="times the profile's durations")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS, help="thresholds, of the batch")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the lengths")
    parser.add_argument("--whole", action="store_true", help="score samples when they are finished only")
    parser.add_argument("--real", action="store_true", help="two vLLM servers on this machine instead")
    options = parser.parse_args(argv)
    if not 0 < options.share < 1:
        parser.error("--share must be between 0 and 1")
    if options.real:
        real(options.fractions, options.seeds)
        return 0
    for count in options.instances:
        blocks = None if options.whole else RESPONSE_BLOCK
        emulate(count, options.share, options.slow, options.fractions, options.seeds, blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
