"""The trainer's CUDA path over torch's real ProcessGroupNCCL, on GPUs that do no arithmetic (hack/nullgpu)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors import safe_open

from helpers.null_gpu import Ended, Run
from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow

# The critic's stages run from the last rank to the first. The planner's search found these orders.
FUSED = {
    2: ["FfbBFfbBFfbBFfbB", "fFBbfFBbfFBbfFBb"],
    4: ["FFfbFFfbfbfBbBBB", "FfFffbFBFbfBbBbB", "fFffFBbfFBFbBbBb", "fffFBfFBFBFbBbbb"],
}
# Two stages of a model on each rank, down the ranks and back: fused-v, whose critic runs against the actor, and zb-v.
# Four stages: fused-w.
V_SHAPED = {
    "fused": [
        "FFFff1ff1F1I1F1I1W1i1ii1iW1IFWIWw1w1ff1F1I1W1F1I1W1ff1wwi1iIWw1wi1iIWw1w",
        "FfFff1F1f1F1FI1i1I1i1W1iIiIW1FWWfF1w1F1f1w1I1W1fI1W1f1i1w1IWiwwi1w1IiWww",
        "fFfFF1f1F1f1fi1I1i1I1W1IiIiFW1FWF1WF1w1w1f1fwI1W1i1w1f1IWI1W1ii1w1IWwiww",
        "fffFF1FF1f1i1f1i1w1I1II1IW1iW1WiWFF1FF1w1fwwf1i1I1IWW1f1w1i1w1I1iIWW1wiw",
    ],
    "along": [
        "FFFFF1I1W1F1I1W1F1I1W1F1I1W1IWIWIWIWfffff1i1w1f1i1w1f1i1w1f1i1w1iwiwiwiw",
        "FFFFF1F1I1W1F1I1W1F1I1W1IWI1W1IWIWIWfffff1f1i1w1f1i1w1f1i1w1iwi1w1iwiwiw",
        "FFFF1FF1F1I1W1F1I1W1IWI1W1IWI1W1IWIWffff1ff1f1i1w1f1i1w1iwi1w1iwi1w1iwiw",
        "FF1FF1FF1FF1I1W1IWI1W1IWI1W1IWI1W1IWff1ff1ff1ff1i1w1iwi1w1iwi1w1iwi1w1iw",
    ],
    "four stages": [
        "FFFff1ff1F1F2F1F2f2f3f2f3F3I3W3F3I3i3i2w3fW3I2f1I1W2Fi1iw1fwI2f1I1W2F1i3i2W1F2IW1f2w3f3WIWi1iw1F3I3w"
        "w2f2f3i3i2w2w2I2F1F2I1W2W1i1iw1wF3I3i3Ii2w2W3w3WW3I2I1i1iw1wW1W2w3IW",
        "FfFff1F1f1F1F2f2F2f2f3F3f3F3I3i3w3I3fi2I2W2Fi3W3i1w1ff1iI2I1wF1W2f1I1W1Ii2f2W1F2w3If3Wi1w1F3FW3iwI3f2"
        "i3Wf3w2i2I2F1W2w2F2I1i1w1W1iF3wi3II3w2i2w2W3w3I2W2i1w1I1W1iwWW3IWw3",
        "fFfFF1f1F1f1f2F2f2F2F3f3F3f3i3I3w3fi3I2i2I3W2fi1w1FW3I2F1iwf1I1W2f2W1If1I1W1i2IF2w3i1w1F3f3Wf2i3W3iw"
        "I3Fw2w2I2F1i2f3W2w2i1F2w1I1F3W1i3iIwWI3W3i2w2I2W2i1w1w3WI1W1iwIW3Ww3",
        "fffFF1FF1f1f2f1f2F2F3F2F3f3i3w3f3i3I3I2W2fw3i2i1w1I3I2FF1W2W3iwf1f2I1IW1Wf1I1Ii2i1F2w1F3f2W1f3i3W3w2"
        "w2iwI3I2FF1W2Wi2i1w1f3i3F2F3I1IW1w2iww3W3I3I2i2i1w1W2w2WW3w3I1IiwW1W",
    ],
}


def v_of_two(count: int) -> list[str]:
    """zb-v of `count` micro-batches, at least 3, on two ranks: actor, then critic."""
    turn = "FIWF1I1W1"
    first = "FFFF1I1W1F1I1W1" + turn * (count - 3) + "IWF1I1W1IWIW"
    second = "FF1FF1I1W1" + turn * (count - 2) + "II1IWW1W"
    return [words + words.lower() for words in (first, second)]


REVERSE = {"reverse": True}
SPLIT = {"split": 4}
# Each is one training step, or more, of actor and critic on as many ranks as the layout has. Where counts have budgets,
# the first one is a warm-up: it has a micro-batch of each shape on each rank.
TRAINING: dict[str, dict[str, Any]] = {
    "pp2": {"layout": {"pp": 2}, "schedules": [2, 2, 4, SPLIT]},
    "sharded": {"layout": {"dp": 2, "tp": 2}, "schedules": [4, 4, 8]},
    "pp4": {"layout": {"pp": 4}, "layers": 4, "critic": REVERSE, "schedules": [4, FUSED[4]]},
    "V, fused": {
        "layout": {"pp": 4, "chunks": 2},
        "world": 4,
        "layers": 8,
        "critic": REVERSE,
        "schedules": [V_SHAPED["fused"]],
    },
    "V": {"layout": {"pp": 4, "chunks": 2}, "world": 4, "layers": 8, "schedules": [V_SHAPED["along"]]},
    "W": {
        "layout": {"pp": 4, "chunks": 4},
        "world": 4,
        "layers": 16,
        "critic": REVERSE,
        "schedules": [V_SHAPED["four stages"]] * 2,
    },
    "V2": {
        "layout": {"pp": 2, "chunks": 2},
        "world": 2,
        "layers": 4,
        "schedules": [v_of_two(4), v_of_two(4), v_of_two(8)],
    },
    "side by side": {
        "layout": {"pp": 4},
        "layers": 4,
        "critic": {"pp": 2, "dp": 2, "pipelines": 2, "reverse": True},
        "schedules": [4],
    },
    "dedicated": {"layout": {"pp": 2}, "critic": {"first": 2}, "world": 4, "schedules": [4, SPLIT]},
    "by layer": {"layout": {"dp": 2}, "zero3": True, "schedules": [4, 4, 8]},
    "recomputed": {"layout": {"pp": 2, "tp": 2}, "recompute": True, "schedules": [4]},
    "adapters": {"layout": {"pp": 2, "dp": 2}, "lora": True, "exports": True, "schedules": [4, {"split": 8}]},
    "all": {
        "layout": {"pp": 2, "dp": 2, "tp": 2},
        "critic": REVERSE,
        "offload": True,
        "exports": True,
        "schedules": [[FUSED[2][rank // 4] for rank in range(8)], SPLIT],
    },
}


# Each way in which ranks share work is in one of these.
ALWAYS = ("pp2", "sharded", "V, fused", "V2", "dedicated", "by layer", "all")


def layouts(*names: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly) for name in names]


def train(null_gpu: Run, name: str) -> Ended:
    scenario = TRAINING[name]
    sizes = scenario["layout"].values()
    world = 1
    for size in sizes:
        world *= size
    return null_gpu(name, "trainer.train", **{"world": world, **scenario})


@pytest.mark.parametrize("name", layouts(*TRAINING))
def test_a_layout_trains(null_gpu: Run, name: str) -> None:
    """No rank waits for a message that its peer sends later, and every rank learns of all steps."""
    for result in train(null_gpu, name).good():
        assert len(result["runs"]) == len(TRAINING[name]["schedules"])
        for run in result["runs"]:
            assert sorted(run["steps"]) == ["actor", "critic"]
            assert run["used"]["sends"] == run["used"]["receives"]
            assert run["used"]["sends"] > 0 or "pp" not in TRAINING[name]["layout"]
            assert run["used"]["communicators"] == 0, "made in a step, where ranks come in unlike orders"


def test_ranks_that_share_a_gpu_send_through_host_memory(null_gpu: Run) -> None:
    """NCCL refuses them. Two columns of two stages, the critic's against the actor's, and a split backward."""
    words = [FUSED[2][rank // 2] for rank in range(4)]
    layout = {"pp": 2, "dp": 2}
    ended = null_gpu(
        "one gpu", "trainer.train", world=4, gpus="3", layout=layout, critic=REVERSE, schedules=[words, {"split": 8}]
    )
    for rank, result in enumerate(ended.good()):
        assert result["staged"] == [True, True]
        for run in result["runs"]:
            assert sorted(run["steps"]) == ["actor", "critic"]
            assert {name: run["used"][name] for name in ("communicators", "collectives", "sends", "receives")} == {
                "communicators": 0,
                "collectives": 0,
                "sends": 0,
                "receives": 0,
            }
        assert set(result["transfers"]) == ({"actor"} if rank < 2 else {"critic"})
    for result in train(null_gpu, "pp2").good():
        assert result["staged"] == [False, False]


@pytest.mark.parametrize("name", layouts("pp4", "side by side", "V, fused", "V"))
def test_few_receives_wait_on_the_gpu_at_once(null_gpu: Run, name: str) -> None:
    """Each spins on multiprocessors that compute needs."""
    for result in train(null_gpu, name).good():
        assert result["receiving"] <= 2


@pytest.mark.parametrize("name", layouts("pp2", "pp4", "V, fused", "W", "side by side", "dedicated", "all"))
def test_messages_have_streams_of_their_own(null_gpu: Run, name: str) -> None:
    """torch gives communicators the streams of a pool of 32 in turn. A message that waits on a stream for another one,
    of a communicator that has nothing to do with it, can hold up a pipeline for ever."""
    for result in train(null_gpu, name).good():
        assert [run["used"]["mixed"] for run in result["runs"][1:]] == [0] * (len(result["runs"]) - 1)
        assert result["runs"][0]["used"]["mixed"] <= 1


def test_messages_have_streams_of_their_own_however_often_groups_were_formed(null_gpu: Run) -> None:
    for found in null_gpu("placed again", "trainer.placed_again", world=2, times=12).good():
        assert found == [0] * 12


def test_groups_of_gpu_tensors_have_no_gloo_beside_nccl(null_gpu: Run) -> None:
    for found in null_gpu("backends", "trainer.backends", world=2).good():
        assert found["backends"] == ["cuda:nccl"] * 4


def test_every_group_has_the_deadline_of_the_trainer(null_gpu: Run) -> None:
    """Also those of the mesh, which torch would give 10 minutes. Sums of gradients wait longer, by choice."""
    for found in null_gpu("backends", "trainer.backends", world=2).good():
        assert found["deadlines"] == [20 * PATIENCE, *[PATIENCE] * 6]


@pytest.mark.parametrize("name", layouts("adapters", "all"))
def test_an_export_holds_whole_tensors(null_gpu: Run, name: str) -> None:
    folder = train(null_gpu, name).folder
    for model, head in (("actor", "lm_head.weight"), ("ema", "lm_head.weight"), ("critic", "score.weight")):
        index = json.loads((folder / model / "model.safetensors.index.json").read_text())["weight_map"]
        assert sum(key.endswith("q_proj.weight") for key in index) == 2
        for key, rows in (("model.embed_tokens.weight", 64), ("model.layers.1.mlp.up_proj.weight", 96), (head, None)):
            with safe_open(folder / model / index[key], "np") as file:
                assert rows in (None, file.get_slice(key).get_shape()[0])


def test_offloaded_moments_come_back_from_a_checkpoint(null_gpu: Run) -> None:
    for result in train(null_gpu, "all").good():
        assert result["moments"] > 0
        assert result["lost"] == []


# What one micro-batch, of actor and critic with two layers each, and an optimizer step of both ask of the GPU.
BUDGETS: dict[str, dict[str, tuple[int, int]]] = {
    # the first and the last of two pipeline stages
    "pp2/0": {"launches": (288, 68), "h2d": (4, 4), "d2h": (0, 2), "sends": (2, 0)},
    "pp2/1": {"launches": (367, 69), "h2d": (4, 4), "d2h": (0, 4), "sends": (2, 0)},
    # two stages on each rank, in a V: the first rank has the first and the last
    "V2/0": {"launches": (655, 91), "h2d": (8, 0), "d2h": (0, 4), "sends": (4, 0)},
    "V2/1": {"launches": (560, 84), "h2d": (4, 0), "d2h": (0, 2), "sends": (4, 0)},
    # tp ranks of the first of two shards
    "sharded/0": {"launches": (637, 73), "h2d": (6, 12), "d2h": (0, 4), "collectives": (20, 14)},
    "sharded/1": {"launches": (633, 75), "h2d": (6, 12), "d2h": (0, 2), "collectives": (20, 14)},
    # two ranks that gather weights and reduce gradients layer by layer, in each pass
    "by layer/0": {"launches": (673, 7), "h2d": (22, 0), "d2h": (0, 4), "collectives": (16, 2)},
    "by layer/1": {"launches": (672, 9), "h2d": (22, 0), "d2h": (0, 4), "collectives": (16, 2)},
}
# The host waits for the device in an optimizer step alone. Nothing is allocated and no communicator is made.
ALWAYS = {"synchronisations": (0, 6), "mallocs": (0, 0), "communicators": (0, 0)}


def over_budget(runs: list[Any], place: str) -> list[str]:
    """What is over the budget of a micro-batch and of a step, from the second of the runs, and the third one, which has
    twice as many micro-batches on each rank."""
    few, many = (run["used"] for run in runs[1:3])
    count = 4 if place.startswith("V2") else 2
    found = []
    for name, (micro_batch, step) in {**ALWAYS, **BUDGETS[place]}.items():
        each = (many[name] - few[name]) / count
        if each > micro_batch:
            found.append(f"a micro-batch has {each} {name}, not {micro_batch}")
        if few[name] - count * micro_batch > step:
            found.append(f"a step has {few[name] - count * micro_batch} {name}, not {step}")
    return found


@pytest.mark.budget
@pytest.mark.parametrize("place", BUDGETS)
def test_a_micro_batch_keeps_to_its_budget(null_gpu: Run, place: str) -> None:
    """Counts are the same in every run. Raise a budget only for a reason."""
    name, _, rank = place.partition("/")
    runs = train(null_gpu, name).good()[int(rank)]["runs"]
    assert over_budget(runs, place) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_backward_in_two_halves_launches_no_more_than_a_whole_one(null_gpu: Run, rank: int) -> None:
    _, _, whole, halves = train(null_gpu, "pp2").good()[rank]["runs"]
    more = {name: used - whole["used"][name] for name, used in halves["used"].items()}
    assert {name: by for name, by in more.items() if by > 0} == {}


@pytest.mark.parametrize("place", ["pp2/1", "V2/0"])
def test_a_stray_item_is_over_the_budget(null_gpu: Run, place: str) -> None:
    """A loss that reads one number makes the host wait twice a micro-batch, for actor and for critic."""
    name, _, rank = place.partition("/")
    stray = {**TRAINING[name], "world": 2, "stray": True, "schedules": TRAINING[name]["schedules"][:3]}
    runs = null_gpu(f"stray {name}", "trainer.train", **stray).good()[int(rank)]["runs"]
    found = over_budget(runs, place)
    assert "a micro-batch has 2.0 synchronisations, not 0" in found
    assert "a micro-batch has 2.0 d2h, not 0" in found


ITERATIONS: dict[str, dict[str, int]] = {
    "alone": {"launches": 14926, "h2d": 216, "d2h": 17, "synchronisations": 22, "mallocs": 1},
    "dp2": {"launches": 7514, "h2d": 159, "d2h": 17, "synchronisations": 22, "mallocs": 3},
}


@pytest.mark.budget
@pytest.mark.parametrize("name", ITERATIONS)
def test_an_iteration_keeps_to_its_budget(null_gpu: Run, name: str) -> None:
    """Old log-probabilities of 16 samples, then 4 optimizer steps of actor and critic on 16 micro-batches, by
    deterministic algorithms: the host waits for the device a few times a step, however many micro-batches there are."""
    dp = 2 if name == "dp2" else 1
    ended = null_gpu(f"iterations {name}", "trainer.iterations", world=dp, dp=dp)
    assert "non-deterministic" not in ended.log
    for _, second, third in ended.good():
        for used in (second, third):
            assert {count: used[count] for count, most in ITERATIONS[name].items() if used[count] > most} == {}
            assert used["communicators"] == 0


def test_versions_are_copied_to_the_host_beside_the_last_optimizer_step(null_gpu: Run) -> None:
    """The step is applied layer by layer, and a layer is copied while the next one is still to be updated."""
    (found,) = null_gpu("versions", "trainer.versions").good()
    assert found["versions"] == [1, 2]
    copies = found["order"].count("copy")
    assert found["pinned"] == [True] * 2 * copies
    assert found["used"]["d2h_beside"] == copies > 20, "all of them, on a stream of their own"
    assert found["used"]["pinned_bytes"] == 0, "the copies of a version that is kept no more are used again"
    first, last = found["order"].index("copy"), len(found["order"]) - found["order"][::-1].index("step")
    assert "step" in found["order"][first:last], found["order"]


def test_a_trace_shows_when_the_gpu_worked(null_gpu: Run) -> None:
    """The host is ahead of the GPU. The second stage cannot begin before the message of the first one has come."""
    first, second = null_gpu("spans", "trainer.spans", world=2).good()
    assert first.keys() == second.keys()
    assert len(first) == 8
    assert second["actor F0"][0] >= first["actor F0"][0] + 0.5
    assert all(start <= end for spans in (first, second) for start, end in spans.values())


@pytest.mark.nightly
def test_compiled_layers_launch_less(null_gpu: Run) -> None:
    """By the real Inductor and the real Triton, whose kernels compute nothing here. Lengths of sequences compile
    nothing anew; a split backward runs the layers as they are."""
    schedules = [4, 4, 8, SPLIT]
    scenario = {"layout": {"pp": 1}, "layers": 4, "schedules": schedules, "compiling": True}
    (alone,) = null_gpu("compiled", "trainer.train", **scenario).good()
    first, four, eight, _ = (run["used"] for run in alone["runs"])
    budget = {"launches": 752, "h2d": 6, "d2h": 0, "synchronisations": 0}  # 1,161 launches as they are
    for name, most in budget.items():
        assert (eight[name] - four[name]) / 4 <= most, name
    assert four["mallocs"] == eight["mallocs"] == 0 < first["mallocs"]


@pytest.mark.parametrize(
    ("told", "layout", "doing"),
    [
        (True, {"pp": 2}, ""),
        (False, {"pp": 2}, "while receiving from it"),
        (False, {"dp": 2}, "in a forward pass of actor"),
    ],
)
def test_a_rank_that_waits_for_a_lost_peer_names_it_and_lives(
    null_gpu: Run, told: bool, layout: dict[str, int], doing: str
) -> None:
    """torch would end the process. The peer dies, which the coordinator tells, or it freezes, which nobody tells."""
    ended = null_gpu(f"lost-{told}-{next(iter(layout))}", "trainer.loses_a_peer", world=2, told=told, **layout)
    assert ended.statuses == [0, 3], f"{ended.statuses} {ended.waits}\n{ended.log}"
    found = ended.results[0]
    assert found["events"] == ["groups.aborted"]
    assert found["world"] == 1
    if told:
        assert found["error"] == "trainer-1 joined again"
    else:
        assert found["error"].startswith(f"trainer rank 1 was lost {doing}: nothing came for")


@pytest.mark.parametrize("during", ["step/1", "load"])
def test_a_rank_whose_gpu_fails_ends(null_gpu: Run, during: str) -> None:
    """CUDA refuses all further work of the process. The job must not fail for it: a new process goes on."""
    (found,) = null_gpu(f"fails {during[:4]}", "trainer.gpu_fails", during=during[:4]).good()
    assert found["raised"].startswith(f"GPUFailed: {during}"), found
    assert "the GPU failed: " in found["raised"]
    assert "CUDA error: " in found["raised"]
    assert found["overdue"] is None
