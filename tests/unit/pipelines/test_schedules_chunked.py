"""Schedules with several stages of a model on each rank."""

import itertools

import pytest

from dovetail.pipelines import (
    CHUNKED,
    FAMILIES,
    ModelPipelines,
    ScheduleError,
    ScheduleProblem,
    SearchEffort,
    check_steps,
    document,
    evaluate,
    family_instance,
    family_of,
    find,
    fixed_orders,
    fused_problem,
    interleaved_family,
    serial_memory,
    steps,
)
from dovetail.pipelines.simulate import KINDS

QUICK = SearchEffort(scale=0.05, workers=1, memory=False, exact=False)


def speed_up(problem, found):
    return find(problem, FAMILIES["serial"], SearchEffort()).makespan / found.makespan


@pytest.mark.parametrize(
    ("stages", "count", "expected"),
    [(4, 4, 1.400), (8, 8, 1.452), (8, 16, 1.387), (16, 16, 1.476), (16, 32, 1.414)],
)
def test_zb_v_twice_takes_what_it_takes_elsewhere(stages, count, expected):
    """The figures come from a simulation outside this project: F = I = W, no latency, two equal models."""
    problem = fused_problem(stages, stages, count, 1, 1)
    found = find(problem, CHUNKED["zb-v"], SearchEffort())
    check_steps(problem, steps(found))
    assert speed_up(problem, found) == pytest.approx(expected, abs=5e-4)
    assert found.peak <= serial_memory(problem) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 4), (4, 16), (8, 3), (8, 24), (5, 7), (4, 10)])
@pytest.mark.parametrize("name", ["interleaved", "interleaved-4", "zb-v"])
def test_published_schedules_are_the_ones_that_torch_ships(name, stages, count):
    from torch.distributed.pipelining import schedules

    problem = fused_problem(stages, stages, count, 1, 1)
    family = family_of(name)
    instance = family_instance(problem, family)
    orders = fixed_orders(instance, family)
    kind = schedules.ScheduleZBVZeroBubble if name == "zb-v" else schedules.ScheduleInterleaved1F1B
    theirs = kind.__new__(kind)
    theirs.pp_group_size, theirs._n_microbatches, theirs.n_local_stages = stages, count, family.chunks
    theirs.num_stages = theirs._num_stages = family.chunks * stages
    theirs.number_of_rounds = max(1, count // stages)
    theirs.microbatches_per_round = count // theirs.number_of_rounds
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    for rank in range(stages):
        expected = [
            (action.stage_index, letters[action.computation_type.name])
            for action in theirs._calculate_single_rank_operations(rank)
            if action is not None
        ]
        actor = [code for code in orders[rank].tolist() if code < family.chunks * KINDS]
        names = "FIW" if instance.split else "FB"
        ours = [(int(instance.position[code // KINDS, rank]), names[code % KINDS]) for code in actor]
        assert ours == expected


@pytest.mark.parametrize("name", ["interleaved", "interleaved-4", "zb-v", "v-half", "v-min"])
def test_any_number_of_micro_batches_ends_on_any_number_of_ranks(name):
    """torch and Megatron-LM refuse some of them for interleaved 1F1B."""
    for ranks, count, mini_batches in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 5, 7, 10, 13, 17), (1, 2)):
        problem = fused_problem(ranks, ranks, count, 3, 2, communication=0.3, mini_batches=mini_batches)
        instance = family_instance(problem, CHUNKED[name])
        found = evaluate(instance, fixed_orders(instance, CHUNKED[name]), name)  # it raises where ranks wait for ever
        check_steps(problem, steps(found))


@pytest.mark.parametrize(("name", "share"), [("v-half", 1 / 2), ("v-min", 1 / 3)])
@pytest.mark.parametrize("stages", [4, 6, 8, 13, 16])
def test_the_memory_is_a_half_or_a_third_and_a_few_micro_batches(name, share, stages):
    """arXiv 2405.15362, table 1: p/2 and p/3 micro-batches of a whole stage, beside a constant."""
    problem = fused_problem(stages, stages, 3 * stages, 1, 1)
    instance = family_instance(problem, CHUNKED[name])
    found = evaluate(instance, fixed_orders(instance, CHUNKED[name]))
    assert stages * share <= found.peak <= stages * share + 2
    assert found.peak < serial_memory(problem)


@pytest.mark.parametrize(("stages", "count", "aim"), [(4, 4, 1.70), (8, 8, 1.80), (8, 16, 1.415), (16, 16, 1.84)])
def test_a_v_of_each_model_in_opposite_directions_beats_what_torch_ships(stages, count, aim):
    free = fused_problem(stages, stages, count, 1, 1)
    problem = ScheduleProblem(free.models, memory_limit=serial_memory(free))
    found = find(problem, CHUNKED["fused-v"], SearchEffort(scale=0.3, workers=2, memory=False, exact=False))
    check_steps(problem, steps(found))
    assert speed_up(free, found) >= aim
    assert found.makespan < find(free, CHUNKED["zb-v"], SearchEffort()).makespan


def replay(written):
    """The makespan and each rank's peak memory from a document alone."""
    models = {m["name"]: m for m in written["models"]}
    ends, held, peak = {}, [0.0] * written["ranks"], [0.0] * written["ranks"]
    actions = sorted((a["start"], a["end"], rank, a) for rank, mine in enumerate(written["actions"]) for a in mine)
    for start, end, rank, a in sorted(actions, key=lambda row: row[:3]):
        m, path = models[a["model"]], models[a["model"]]["ranks"][a["pipeline"]]
        assert path[a["stage"]] == rank
        key = (a["model"], a["pipeline"], a["micro_batch"])
        needs = {
            "F": [(a["stage"] - 1, "F")] if a["stage"] else [],
            "I": [(a["stage"], "F"), *([(a["stage"] + 1, "I")] if a["stage"] + 1 < m["stages"] else [])],
            "W": [(a["stage"], "I")],
        }[a["kind"]]
        for stage, kind in needs:
            sent = written["communication"] if path[stage] != rank else 0
            assert start >= ends[*key, stage, kind] + sent - 1e-9
        ends[*key, a["stage"], a["kind"]] = end
    for rank, mine in enumerate(written["actions"]):
        for a, b in itertools.pairwise(mine):
            assert a["end"] <= b["start"] + 1e-9
        for a in mine:
            held[rank] += {"F": 1, "I": 0, "W": -1}[a["kind"]] * models[a["model"]]["activation"]
            peak[rank] = max(peak[rank], held[rank])
    return max(ends.values()), max(peak)


@pytest.mark.parametrize("chunks", [2, 3, 4, 7])
def test_more_chunks_in_a_loop_wait_less(chunks):
    """Narayanan et al. 2021, section 2.2: with v chunks the bubble is 1 / v of that of 1F1B, and memory is higher."""
    problem = fused_problem(8, 8, 16, 1, 1)
    family = interleaved_family(chunks)
    found = find(problem, family, SearchEffort())
    check_steps(problem, steps(found))
    assert found.makespan == pytest.approx(2 * 3 * (16 + 7 / chunks))
    assert found.peak == pytest.approx(8 + 7 / chunks)


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("fused-v", "fused-w")]


@pytest.mark.parametrize("name", [*LONG, "zb-v", "v-min"])
def test_anyone_can_check_a_schedule_from_its_document(name):
    problem = fused_problem(4, 2, 2, 1, 1, communication=0.25)
    found = find(problem, CHUNKED[name], QUICK)
    written = document(found)
    chunks = found.instance.placement.chunks
    assert [m["stages"] for m in written["models"]] == [4 * chunks, 2 * chunks]
    down = [0, 1, 2, 3]
    assert written["models"][0]["ranks"] == [(down + down[::-1]) * (chunks // 2)]
    critic = written["models"][1]["ranks"]
    assert critic[0][:4] == ([1, 0, 0, 1] if found.instance.placement.reverse else [0, 1, 1, 0])
    makespan, peak = replay(written)
    assert makespan == pytest.approx(written["makespan"])
    assert peak == pytest.approx(written["peak"])


def test_times_given_by_parts_are_those_of_the_chunks():
    """An embedding and a head of their own cost: the last of eight parts takes three times as long."""
    times = [[[1.0], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0], [3.0]]]
    models = [
        ModelPipelines(name, 4, 4, times, [[[2 * t[0]] for t in times[0]]], parts=2) for name in ("actor", "critic")
    ]
    problem = ScheduleProblem((models[0], models[1]))
    whole = family_instance(problem, FAMILIES["fused"])
    assert whole.duration[0, 0, :, 0].tolist() == [2, 2, 2, 4]
    vee = family_instance(problem, CHUNKED["fused-v"])
    assert vee.duration[0, 0, :, 0].tolist() == [1, 1, 1, 1]
    assert vee.duration[1, 0, :, 0].tolist() == [3, 1, 1, 1], "the head is on the first rank"
    four = family_instance(problem, CHUNKED["fused-w"])
    assert four.duration[3, 0, :, 0].tolist() == [1.5, 1.5, 0.5, 0.5]


def test_a_rank_with_fewer_stages_than_others_is_named():
    problem = fused_problem(2, 2, 2, 1, 1)
    lists = steps(find(problem, CHUNKED["fused-v"], QUICK))
    cut = [[s for s in mine if not (s.model == "actor" and s.stage == 3)] for mine in lists]
    with pytest.raises(ScheduleError, match="actor has 3 stages on 2 ranks"):
        check_steps(problem, cut)
