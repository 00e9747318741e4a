"""RLHFuse (arXiv 2409.13221), section 7: 32 nodes of 8 H100, batch 512, mini-batches of 64, HH-RLHF prompts.

The text at hand gives 3.7 times DeepSpeed-Chat's throughput at most, 1.4 to 2.4 times that of tailored parallelism
(ReaLHF) and 1.2 to 1.4 times its own without fusion; the bars of figures 7 to 9 are drawings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.planner.candidate import Candidate, Placement, Share
from dovetail.planner.workload import Workload
from papers.common import Figure, Measured, Section, best, llama, tensor_parallel
from papers.deepspeed import SYSTEM as DEEPSPEED
from papers.deepspeed import Config
from papers.planner import planned
from papers.system import System

H100 = gpu("NVIDIA-H100-80GB-HBM3")
GPUS = 256
NETWORK = 25e9  # a GPU's 200 Gbit/s card
INVENTORY = Inventory((Pool("h100", H100, GPUS // 8, 8, NETWORK),))
SETTINGS = ("13B/33B", "33B/13B", "33B/65B", "65B/33B")
TOKENS = (512, 1024, 2048)
BATCH, MINI, DEEPSPEED_MINI = 512, 64, 256
PROMPT = Lengths.fixed(144)  # the mean of HH-RLHF's 32 to 256
THRESHOLDS = tuple(k / 100 for k in range(5, 100, 5))
# Speed-up of RLHFuse over each: least and most published.
PUBLISHED = {"DeepSpeed-Chat": (None, 3.7), "ReaLHF": (1.4, 2.4), "RLHFuse-Base": (1.2, 1.4)}
THRESHOLD = 0.20
MOST_OTHER = 0.03  # of an iteration that is neither of the stages
# Tailored layouts for each task. RLHFuse's engine refills batches, deals mini-batches by length and swaps ahead, ReaLHF
# does none of these ("the customized kernels in the inference engine and the mini-batch load balancing").
BASE = System(shared_weights=True, hidden_swaps=True, max_samples=512)
REAL = System(continuous=False, balanced=False, shared_weights=True, max_samples=512)
NAMES = ("RLHFuse", "RLHFuse-Base", "ReaLHF", "DeepSpeed-Chat")


def workload(setting: str, tokens: int) -> Workload:
    actor, critic = (llama(name) for name in setting.split("/"))
    return Workload(actor, actor, critic, critic, BATCH, MINI, 1, PROMPT, Lengths.long_tailed(tokens))


def trainings(tps: tuple[int, ...]) -> Iterator[Share]:
    """Layouts of all GPUs that a mini-batch divides among."""
    for tp in tps:
        for pp in (1, 2, 4, 8, 16):
            dp = GPUS // (tp * pp)
            for micro in (1, 2, 4):
                if MINI % (dp * micro) == 0:
                    yield Share("h100", pp=pp, tp=tp, dp=dp, micro_batch=micro, fsdp=1)


def _sensible(actor: Share, critic: Share) -> bool:
    """Both models' stages share the positions of one schedule."""
    positions = lcm(actor.pp, critic.pp)
    if actor.tp != critic.tp or positions not in (actor.pp, critic.pp):
        return False
    return actor.micro_batch == critic.micro_batch


def tailored(
    work: Workload, system: System, schedules: Sequence[str], migrations: Sequence[float | None]
) -> Measured | None:
    """The best layout of each task on all GPUs (the paper searches by brute force), training's two together."""
    critics = work.critic or work.actor
    known = list(trainings(tensor_parallel(work.actor, critics)))
    pairs = [(a, k) for a in known for k in known if _sensible(a, k)]
    reference, scorer = (_everywhere(tensor_parallel(shape)[-1], 2) for shape in (work.actor, critics))

    def candidate(servers: Share, actor: Share, critic: Share, schedule: str, migration: float | None) -> Candidate:
        return Candidate(
            Placement.FLATTENING,
            (servers,),
            (actor,),
            (critic,),
            (reference,),
            (scorer,),
            (scorer,),
            schedule=schedule,  # type: ignore[arg-type]
            migration=migration,
        )

    servers = [_everywhere(tp) for tp in tensor_parallel(work.actor)]
    trained = best(
        (candidate(servers[-1], a, k, s, None) for a, k in pairs for s in schedules), work, INVENTORY, system
    )
    if trained is None:
        return None
    c = trained.candidate
    return best(
        (candidate(s, c.actor_training[0], c.critic_training[0], c.schedule, m) for s in servers for m in migrations),
        work,
        INVENTORY,
        system,
    )


def _everywhere(tp: int, micro_batch: int = 1) -> Share:
    return Share("h100", tp=tp, dp=GPUS // tp, micro_batch=micro_batch, offload=True)


def deepspeed(work: Workload) -> Measured | None:
    """ "We increase its mini-batch size to 256"; the best of all its options."""
    larger = replace(work, mini_batch=DEEPSPEED_MINI)
    candidates = (
        Config(3, tp, recompute, offload).candidate("h100", GPUS, 1)
        for tp in tensor_parallel(work.actor)
        for recompute in (False, True)
        for offload in (False, True)
    )
    return best(candidates, larger, INVENTORY, DEEPSPEED)


@dataclass(frozen=True)
class Compared:
    """Seconds of an iteration."""

    work: Workload
    systems: dict[str, Measured | None]
    inter: Measured | None
    intra: Measured | None


def compared(setting: str, tokens: int) -> Compared:
    work = workload(setting, tokens)
    fused = tailored(work, BASE, ("Serial", "Fused"), (None, *THRESHOLDS))
    return Compared(
        work,
        {
            "RLHFuse": fused,
            "RLHFuse-Base": tailored(work, BASE, ("Serial",), (None,)),
            "ReaLHF": tailored(work, REAL, ("Serial",), (None,)),
            "DeepSpeed-Chat": deepspeed(work),
        },
        tailored(work, BASE, ("Serial",), (None, *THRESHOLDS)),
        tailored(work, BASE, ("Serial", "Fused"), (None,)),
    )


def sections() -> Iterator[Section]:
    section = Section("RLHFuse figure 7, throughput", "times, RLHFuse over each")
    other = Section("RLHFuse figures 8 and 9, parts", "as named", higher=False)
    gains: dict[str, list[float]] = {name: [] for name in PUBLISHED}
    rest, thresholds = [], []
    for setting in SETTINGS:
        for tokens in TOKENS:
            each = compared(setting, tokens)
            ours = each.systems["RLHFuse"]
            if ours is None:
                section.notes.append(f"{setting} {tokens}: RLHFuse does not fit")
                continue
            line = []
            for name in PUBLISHED:
                system = each.systems[name]
                if system is not None:
                    gains[name].append(system.seconds / ours.seconds)
                    line.append(f"{name} {gains[name][-1]:.2f}")
            _order(section, f"{setting} {tokens}", each)
            phases = ours.estimate.phases
            rest.append((phases["transfer"] + phases["swap"]) / ours.seconds)
            thresholds.append(ours.candidate.migration or 0.0)
            alone = [m.seconds for m in (each.inter, each.intra) if m is not None]
            base = each.systems["RLHFuse-Base"]
            if base is not None and len(alone) == 2:
                line.append(f"(inter-stage {base.seconds / alone[0]:.2f}, intra-stage {base.seconds / alone[1]:.2f})")
            section.notes.append(f"{setting:8}{tokens:>5} tokens: {', '.join(line)}; {ours.seconds:.1f} s")
            known = [m.seconds for m in each.systems.values() if m is not None]
            plan = planned(each.work, INVENTORY)
            if plan is not None:
                section.planned.append((f"RLHFuse {setting} {tokens}", plan, min(known)))
    for name, (least, most) in PUBLISHED.items():
        if least is not None:
            section.figures.append(Figure(name, "least", least, min(gains[name])))
        section.figures.append(Figure(name, "most", most, max(gains[name])))
    yield section
    other.notes.append(
        f"best threshold: {min(thresholds):.0%} to {max(thresholds):.0%} of the batch (paper: about {THRESHOLD:.0%})"
    )
    other.notes.append(
        f"transfers and swaps: at most {max(rest):.1%} of an iteration (paper: less than {MOST_OTHER:.0%})"
    )
    yield other


def _order(section: Section, where: str, each: Compared) -> None:
    """RLHFuse over RLHFuse-Base over ReaLHF over DeepSpeed-Chat, in every setting."""
    for i, better in enumerate(NAMES):
        for worse in NAMES[i + 1 :]:
            a, b = each.systems[better], each.systems[worse]
            if a is not None and b is not None:
                section.orders.append((f"{where} {better}", worse, a.seconds < b.seconds))
