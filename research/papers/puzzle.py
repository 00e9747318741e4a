"""PUZZLE (USENIX ATC 2024), section 7: two clusters of four nodes of 8 A100-80GB, PCIe and NVLink, 100 Gbit/s a node.

The bars of figures 8 to 12 are drawings: what the text says of them (averages, largest values, orders) is compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.model_shape import ModelShape
from dovetail.pipelines import FAMILIES, SearchEffort, find, fused_problem
from dovetail.planner.candidate import Candidate, Placement, Share
from dovetail.planner.seconds import COLLECTIVE_SECONDS, LINK
from dovetail.planner.workload import Workload
from papers.common import Figure, Measured, Section, best, tensor_parallel
from papers.common import llama as usual
from papers.deepspeed import SYSTEM as DEEPSPEED
from papers.deepspeed import Config
from papers.planner import planned
from papers.routing import RankGrid, Tensor, route
from papers.system import System, SystemCosts

CLUSTERS = {"orion": gpu("NVIDIA-A100-80GB-PCIe"), "phoenix": gpu("NVIDIA-A100-SXM4-80GB")}
NETWORK = 12.5e9 / 8  # a GPU's part of its node's 100 Gbit/s
# Table 2: actor (and reference) / critic (and reward model), batch, GPUs.
SETTINGS = {
    "7B/350M": (128, 8),
    "7B/7B": (256, 16),
    "13B/350M": (256, 16),
    "13B/7B": (256, 16),
    "33B/7B": (128, 32),
}
FIGURE_8 = {"orion": 1.83, "phoenix": 1.50}  # average speed-up over DeepSpeed-Chat
FIGURE_8_MOST = 2.12
FIGURE_9_MOST = 1.12
FIGURE_10_MOST = 1.34  # (16, 1, 1), 7B/7B
FIGURE_11 = {"generation-optimal": 1.22, "training-optimal": 1.34}
# Table 3, seconds: PUZZLE and DeepSpeed-Chat.
TABLE_3 = {
    "7B/350M": {"orion": (0.31, 1.32), "phoenix": (0.02, 1.03)},
    "13B/350M": {"orion": (0.37, 3.02), "phoenix": (0.20, 2.02)},
    "33B/7B": {"orion": (0.49, 7.54), "phoenix": (0.48, 3.37)},
}
# Generation layouts that the text names for 33B/7B, from (32, 1, 1).
NAMED = {"orion": (16, 1, 2), "phoenix": (8, 1, 4)}
# Megatron-LM: samples decode as one batch (all lengths are 256). Its shadow model for generation gets its weights by
# the switch, not from the host.
SYSTEM = System(continuous=False, hidden_swaps=True, max_samples=1024)
# "We configured the lower tensor parallelism setting in the generation phase of DeepSpeed-Chat": the lowest that fits.
MICROS = (1, 2, 4, 8)


def llama(name: str) -> ModelShape:
    """Its Table 1: 64 layers of the 33B, so that stages are equal."""
    return replace(usual(name), layers=64) if name == "33B" else usual(name)


def inventory(cluster: str, gpus: int) -> Inventory:
    return Inventory((Pool("a100", CLUSTERS[cluster], gpus // 8, 8, NETWORK),))


def workload(setting: str, batch: int) -> Workload:
    actor, critic = (llama(name) for name in setting.split("/"))
    return Workload(actor, actor, critic, critic, batch, batch, 1, Lengths.fixed(256), Lengths.fixed(256))


def layouts(gpus: int, tps: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(pp, dp, tp), as PUZZLE writes them."""
    found = []
    for pp in (1, 2, 4, 8, 16, 32):
        for tp in tps:
            if gpus % (pp * tp) == 0:
                found.append((pp, gpus // (pp * tp), tp))
    return found


def candidate(
    generation: tuple[int, int, int], training: tuple[int, int, int], gpus: int, layers: int, micro: int, schedule: str
) -> Candidate | None:
    """Everything on all GPUs, in one of two layouts; the smaller critic has as many stages as it has layers."""
    pp, dp, tp = training
    if pp > layers:
        return None
    trained = Share("a100", pp=pp, tp=tp, dp=dp, micro_batch=micro, fsdp=1)
    scored = (replace(trained, fsdp=0),)
    gpp, gdp, gtp = generation
    return Candidate(
        Placement.FLATTENING,
        (Share("a100", pp=gpp, tp=gtp, dp=gdp, offload=True),),
        (trained,),
        (trained,),
        scored,
        scored,
        scored,
        schedule=schedule,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Compared:
    """The fastest of each strategy in one setting, None where it does not fit."""

    puzzle: Measured
    serial: Measured
    base: Measured | None
    generation: Measured | None
    deepspeed: Measured | None


def compared(setting: str, cluster: str) -> Compared | None:
    batch, gpus = SETTINGS[setting]
    work, there = workload(setting, batch), inventory(cluster, gpus)
    layers = min(work.actor.layers, work.critic.layers if work.critic else 1)
    tps = tensor_parallel(work.actor, *([work.critic] if work.critic else []))
    known = layouts(gpus, tps)

    def search(pairs: Iterator[tuple[tuple[int, int, int], tuple[int, int, int]]], schedule: str) -> Measured | None:
        candidates = (candidate(g, t, gpus, layers, m, schedule) for g, t in pairs for m in MICROS)
        return best((c for c in candidates if c is not None), work, there, SYSTEM)

    puzzle = search(product(known, known), "TimeSharing")
    serial = search(product(known, known), "Serial")
    if puzzle is None or serial is None:
        return None
    deepest = min(gpus, layers)
    only = (deepest, gpus // deepest, 1)
    fixed = [m for layout in known if (m := search(iter([(layout, layout)]), "TimeSharing"))]
    generation = min(fixed, key=lambda m: m.estimate.phases["generation"], default=None)
    zero = (
        best(
            [
                Config(3, tp, recompute, offload).candidate("a100", gpus, -(-batch // gpus))
                for recompute in (False, True)
                for offload in (False, True)
            ],
            work,
            there,
            DEEPSPEED,
        )
        for tp in tps
        if tp > 1
    )
    base = search(iter([(only, only)]), "Serial")
    return Compared(puzzle, serial, base, generation, next((z for z in zero if z), None))


def ranks_of(share: Share) -> RankGrid:
    """A share's layout, over its pool's GPUs as ranks."""
    return RankGrid(pp=share.pp, tp=share.tp, dp=share.dp, first=share.first, sharded=share.fsdp == 3)


def switching(setting: str, cluster: str, found: Compared) -> tuple[float, float]:
    """Seconds to bring the actor from its training to its generation layout: PUZZLE by its routing table,
    DeepSpeed-Chat by gathering."""
    actor, (_, gpus) = llama(setting.split("/")[0]), SETTINGS[setting]
    mine = found.puzzle.candidate
    training, generation = ranks_of(mine.actor_training[0]), ranks_of(mine.generation[0])
    if setting == "33B/7B":
        pp, dp, tp = NAMED[cluster]
        training, generation = RankGrid(pp=32), RankGrid(pp=pp, dp=dp, tp=tp)
    h, i, vocabulary = actor.hidden, actor.intermediate, actor.vocabulary
    tensors = [Tensor("embed", (vocabulary, h), 0, 0), Tensor("head", (vocabulary, h), actor.layers - 1, 0)]
    for layer in range(actor.layers):
        # Each matrix of a block with the dimension that tensor parallel ranks share.
        for name, rows, columns, dim in (("qkv", 3 * h, h, 0), ("o", h, h, 1), ("up", 2 * i, h, 0), ("down", h, i, 1)):
            tensors.append(Tensor(f"{layer}.{name}", (rows, columns), layer, dim))
    table = route(tensors, actor.layers, training, generation, 8)
    there = inventory(cluster, gpus)
    pool = there.pools[0]
    routed = table.seconds(8, LINK * pool.gpu.peer, LINK * pool.network, COLLECTIVE_SECONDS)
    zero = found.deepspeed
    theirs = 0.0
    if zero is not None:
        only = replace(zero.candidate, critic_training=(), critic=())
        theirs = SystemCosts(zero.work, there, DEEPSPEED).transfer(only)
    return routed, theirs


def sections() -> Iterator[Section]:
    found = {
        (setting, cluster): each
        for setting in SETTINGS
        for cluster in CLUSTERS
        if (each := compared(setting, cluster)) is not None
    }
    yield from (
        _figure_8(found),
        _figure_9(found),
        _equation_1(),
        _figure_11(found),
        _figure_12(found),
        _table_3(found),
    )


Found = dict[tuple[str, str], Compared]


def _figure_8(found: Found) -> Section:
    section = Section("PUZZLE figure 8, whole iterations", "times DeepSpeed-Chat")
    gains: dict[str, list[float]] = {name: [] for name in CLUSTERS}
    for (setting, cluster), each in found.items():
        if each.deepspeed is None or each.base is None:
            section.notes.append(f"{cluster} {setting}: DeepSpeed-Chat or PUZZLE-Base does not fit")
            continue
        gain, base = each.deepspeed.seconds / each.puzzle.seconds, each.deepspeed.seconds / each.base.seconds
        gains[cluster].append(gain)
        section.notes.append(
            f"{cluster:8} {setting:9} PUZZLE {gain:.2f}, PUZZLE-Base {base:.2f}  {_chosen(each.puzzle)}"
        )
        section.orders.append((f"PUZZLE {cluster} {setting}", "PUZZLE-Base", gain > base))
        section.orders.append((f"PUZZLE-Base {cluster} {setting}", "DeepSpeed-Chat", base > 1))
        plan = planned(each.puzzle.work, inventory(cluster, SETTINGS[setting][1]))
        if plan is not None:
            section.planned.append(
                (f"PUZZLE {cluster} {setting}", plan, min(each.puzzle.seconds, each.deepspeed.seconds))
            )
    for cluster, published in FIGURE_8.items():
        section.figures.append(Figure(cluster, "average", published, mean(gains[cluster])))
    section.figures.append(Figure("of all", "largest", FIGURE_8_MOST, max(max(g) for g in gains.values())))
    return section


def _figure_9(found: Found) -> Section:
    section = Section("PUZZLE figure 9, time-sharing in the training stage", "times without")
    gains = {}
    for key, each in found.items():
        shared = each.serial.candidate
        sharing = best([replace(shared, schedule="TimeSharing")], each.serial.work, _there(key), SYSTEM)
        if sharing is not None:
            gains[key] = each.serial.estimate.phases["training"] / sharing.estimate.phases["training"]
    section.figures.append(Figure("of all", "largest", FIGURE_9_MOST, max(gains.values())))
    for cluster in CLUSTERS:
        section.notes.append(
            f"{cluster:8} " + ", ".join(f"{s} {gains[s, cluster]:.3f}" for s in SETTINGS if (s, cluster) in gains)
        )
        alike, unlike = gains.get(("7B/7B", cluster)), gains.get(("7B/350M", cluster))
        if alike and unlike:
            section.orders.append((f"{cluster} 7B/7B (alike)", "7B/350M (unlike)", alike >= unlike))
    return section


def _there(key: tuple[str, str]) -> Inventory:
    setting, cluster = key
    return inventory(cluster, SETTINGS[setting][1])


def _equation_1() -> Section:
    """The schedule that the executor would run against PUZZLE's formula; the largest is at (16, 1, 1), equal models."""
    section = Section("PUZZLE figure 10, equation 1: (16, 1, 1), 7B/7B", "times serial")
    stages, count = 16, 16
    problem = fused_problem(stages, stages, count, 1.0, 1.0)
    serial, stitched = (find(problem, FAMILIES[name], SearchEffort()).makespan for name in ("serial", "stitched"))
    formula = 2 * (count + stages - 1) / (2 * count + stages - 1)
    section.figures.append(Figure("16 micro-batches", "measured by them", FIGURE_10_MOST, serial / stitched))
    section.figures.append(Figure("16 micro-batches", "their equation", formula, serial / stitched))
    return section


def _figure_11(found: Found) -> Section:
    section = Section("PUZZLE figure 11, against one layout for both tasks", "times")
    gains: dict[str, list[float]] = {"generation-optimal": [], "training-optimal": []}
    by_cluster: dict[str, list[float]] = {name: [] for name in CLUSTERS}
    for (setting, cluster), each in found.items():
        if each.generation is None or each.base is None:
            continue
        once, trained = each.generation.seconds / each.puzzle.seconds, each.base.seconds / each.puzzle.seconds
        gains["generation-optimal"].append(once)
        gains["training-optimal"].append(trained)
        by_cluster[cluster].append(mean((once, trained)))
        section.orders.append((f"generation-optimal {cluster} {setting}", "training-optimal", once <= trained))
    for name, published in FIGURE_11.items():
        section.figures.append(Figure(name, "average", published, mean(gains[name])))
    section.orders.append(("phoenix", "orion", mean(by_cluster["phoenix"]) > mean(by_cluster["orion"])))
    return section


def _figure_12(found: Found) -> Section:
    section = Section("PUZZLE figure 12, stages of 7B/7B", "seconds")
    for cluster in CLUSTERS:
        each = found["7B/7B", cluster]
        if each.deepspeed is None:
            continue
        # The first stage begins with the switch to it.
        for phase, parts in (("generation", ("transfer", "generation")), ("inference", ()), ("training", ())):
            measured = (each.puzzle, each.deepspeed)
            mine, theirs = (sum(m.estimate.phases[p] for p in parts or (phase,)) for m in measured)
            section.notes.append(f"{cluster:8} {phase:11} PUZZLE {mine:6.2f}, DeepSpeed-Chat {theirs:6.2f}")
            section.orders.append((f"PUZZLE's {phase} on {cluster}", "DeepSpeed-Chat's", mine < theirs))
    return section


def _table_3(found: Found) -> Section:
    section = Section("PUZZLE table 3, switching the actor", "seconds", higher=False)
    for setting, clusters in TABLE_3.items():
        for cluster, published in clusters.items():
            each = found.get((setting, cluster))
            if each is None:
                continue
            for name, value, ours in zip(
                ("PUZZLE", "DeepSpeed-Chat"), published, switching(setting, cluster, each), strict=True
            ):
                section.figures.append(Figure(name, f"{cluster} {setting}", value, ours))
    return section


def _chosen(each: Measured) -> str:
    training, generation = each.candidate.actor_training[0], each.candidate.generation[0]
    return (
        f"(P,D,T) training ({training.pp},{training.dp},{training.tp}), "
        f"generation ({generation.pp},{generation.dp},{generation.tp})"
    )
