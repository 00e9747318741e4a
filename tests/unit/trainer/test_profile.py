"""Measured times: what is measured, and the problem that the schedule chooser makes of it."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dovetail.cli.common.plan_inputs import read_profile
from dovetail.cli.main import cli
from dovetail.coordinator.schedules.stage_times import stage_layers
from dovetail.coordinator.schedules.training_schedule import Times, profiled_problem, shared_layouts, training_problem
from dovetail.launch.local.rundir import RunDir
from dovetail.manifest.types import Parallelism, ScratchModel
from dovetail.models import ModelError
from dovetail.pipelines import FAMILIES, ProblemError, family_instance
from dovetail.protocol.files.machine_profile import LinkTimes, ModelTimes, PassTimes, Profile
from dovetail.protocol.messages import ModelRef, StageTimes
from dovetail.trainer.profile import measure_link, measure_model
from helpers.two_cores import MACHINE

CONFIG = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "pad_token_id": 0}
FAMILY = {
    "llama": {"intermediate_size": 48, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
}


@pytest.mark.parametrize(("family", "head"), [*((family, "lm") for family in FAMILY), ("llama", "value")])
def test_every_part_of_a_model_is_measured(family, head):
    ref = ModelRef(head=head, scratch=ScratchModel(architecture=family, config={**CONFIG, **FAMILY[family]}))
    found = measure_model(ref, [1, 4], 12, torch.device("cpu"), torch.float32, repeats=3)
    assert (found.layers, found.hidden_size, found.bytes_per_value, found.head) == (5, 32, 4, head)
    for part in (found.embedding_times, found.layer_times, found.head_times):
        assert [p.micro_batch for p in part] == [1, 4]
    for layer in found.layer_times:
        assert min(layer.forward, layer.backward, layer.input_gradient, layer.weight_gradient) > 0
    one, four = (layer.activation_bytes for layer in found.layer_times)
    assert 3 * one < four < 5 * one
    # At the least the layer's input, in float32.
    assert four >= 4 * 12 * 32 * 4


def test_the_embedding_is_what_its_stage_takes_beyond_a_layer():
    """A clock that advances by 1 whenever it is read: every measured half or whole takes 1."""
    ref = ModelRef(head="lm", scratch=ScratchModel(architecture="llama", config={**CONFIG, **FAMILY["llama"]}))
    found = measure_model(ref, [2], 8, torch.device("cpu"), torch.float32, 2, clock=itertools.count().__next__)
    layer, embedding = found.layer_times[0], found.embedding_times[0]
    assert (layer.forward, layer.backward, layer.input_gradient, layer.weight_gradient) == (1, 1, 1, 1)
    # Its stage takes 1 for nothing in the first half and 1 for both halves of everything in the second.
    assert (embedding.forward, embedding.backward, embedding.input_gradient, embedding.weight_gradient) == (0, 0, 0, 0)


def test_a_clock_that_stands_still_measures_nothing():
    ref = ModelRef(head="lm", scratch=ScratchModel(architecture="llama", config={**CONFIG, **FAMILY["llama"]}))
    found = measure_model(ref, [2], 8, torch.device("cpu"), torch.float32, repeats=1, clock=lambda: 0.0)
    assert found.layer_times[0].forward == found.layer_times[0].backward == 0
    assert found.layer_times[0].activation_bytes > 0


def test_a_model_that_cannot_be_used_is_refused():
    with pytest.raises(ModelError, match="vocab_size"):
        measure_model(ModelRef(head="lm", scratch=ScratchModel()), [1], 8, torch.device("cpu"), torch.float32)


@pytest.mark.slow
def test_messages_between_two_processes_are_measured():
    link = measure_link(repeats=3, seconds=300)
    assert 0 < link.latency < 10
    assert link.bytes_per_second > 1e6


def times(size, scale, halves=(1.0, 1.2)):
    return PassTimes(
        micro_batch=size,
        forward=scale * size,
        backward=2 * scale * size,
        input_gradient=halves[0] * scale * size,
        weight_gradient=halves[1] * scale * size,
        activation_bytes=100 * size,
    )


def model(layers=6, scale=1.0, sizes=(1, 4)):
    return ModelTimes(
        head="lm",
        layers=layers,
        hidden_size=8,
        bytes_per_value=4,
        embedding_times=[times(s, 0.1 * scale) for s in sizes],
        layer_times=[times(s, scale) for s in sizes],
        head_times=[times(s, 0.5 * scale) for s in sizes],
    )


def profile(**models):
    link = LinkTimes(latency=0.25, bytes_per_second=1024)
    return Profile(device="cpu", threads=1, tokens=16, models=models, link=link)


def test_stages_take_the_times_of_their_layers_and_ends():
    problem = profiled_problem(profile(actor=model(), critic=model(scale=0.5)), (4, 2), 8, 2)
    critic = problem.models[1]
    assert (critic.pipelines, critic.micro_batches) == (2, 4)
    # Six layers in four stages: 2, 2, 1, 1; a micro-batch of 2 lies between those measured.
    assert problem.array(0, "forward")[:, 0].tolist() == pytest.approx([4.2, 4.0, 2.0, 3.0])
    assert problem.array(1, "backward")[:, 0].tolist() == pytest.approx([6.2, 7.0] * 2)
    assert problem.array(0, "activation")[:, 0].tolist() == pytest.approx([600, 400, 200, 400])
    assert problem.communication == pytest.approx(0.25 + 2 * 16 * 8 * 4 / 1024)
    # Split, the two halves take a tenth longer, and the first stage's first half nothing.
    split = family_instance(problem, FAMILIES["fused-split"]).duration
    assert split[0, 1, :, 0] == pytest.approx([0, 4.0, 2.0, 3.0], abs=1e-6)
    assert split[0, 2, :, 0] == pytest.approx([4.2 + 1.2 * 4.2, 4.8, 2.4, 3.6])


@given(st.integers(1, 40), st.integers(1, 12))
def test_layers_are_split_as_the_trainer_splits_them(layers, stages):
    from dovetail.protocol.weights import layer_range

    if stages > layers:
        with pytest.raises(
            ProblemError, match=f"{stages} pipeline stages need at least {stages} layers, the actor has {layers}"
        ):
            stage_layers("actor", layers, stages)
    else:
        assert stage_layers("actor", layers, stages) == [len(layer_range(layers, i, stages)) for i in range(stages)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stages": (4, 3)}, "the critic's 3 pipeline stages do not divide 4"),
        ({"stages": (4, 2), "micro_batches": 3}, "3 micro-batches cannot be divided among the critic's 2 pipelines"),
        ({"stages": (8, 8)}, "8 pipeline stages need at least 8 layers, the actor has 6; use fewer"),
        ({"memory_limit": 10.0}, "a memory limit of 10 is below what any schedule needs"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, sentence):
    given = {"stages": (2, 2), "micro_batches": 4, "micro_batch": 1} | changes
    with pytest.raises(ProblemError, match=sentence):
        profiled_problem(profile(actor=model(), critic=model()), **given)


@pytest.fixture
def measured(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile(actor=model(), critic=model(scale=0.5)).model_dump_json(by_alias=True))
    return path


COMMAND = ["schedule", "--stages", "2", "2", "--micro-batches", "4"]


def test_a_schedule_is_chosen_by_a_profile(measured, tmp_path):
    out = tmp_path / "s.json"
    more = ["--profile", str(measured), "--micro-batch-size", "4", "--family", "stitched", "-o", str(out)]
    result = CliRunner().invoke(cli, [*COMMAND, "--seconds", "1", *more])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert [stage[0] for stage in written["models"][0]["forward"][0]] == pytest.approx([12.4, 14.0])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: No such file or directory."),
        ("{}", "is no profile: device: Field required; make one with dovetail profile."),
        ("[", "is no profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(text, sentence, tmp_path):
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    result = CliRunner().invoke(cli, [*COMMAND, "--profile", str(path)])
    assert result.exit_code == 2
    assert sentence in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_an_older_file_keeps_its_times(tmp_path):
    written = profile(actor=model()).model_copy(update={"machine": MACHINE})
    document = json.loads(written.model_dump_json(by_alias=True))
    scoring = document["machine"]["scoring"]
    scoring["chunk"] = scoring.pop("batch")
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    assert read_profile(path) == written


def test_without_a_profile_the_times_must_be_given():
    result = CliRunner().invoke(cli, COMMAND)
    assert result.exit_code == 2
    assert "--forward is missing" in result.output


def test_a_run_takes_the_file_along(measured, tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text((Path(__file__).parents[3] / "examples" / "quickstart.yaml").read_text())
    read = read_profile(measured)
    folder = RunDir(tmp_path / "run")
    folder.open(resume=False, overwrite=False)
    try:
        folder.write_profile(read)
    finally:
        folder.close()
    assert read_profile(tmp_path / "run" / "profile.json") == read
    result = CliRunner().invoke(cli, ["run", str(manifest), "--profile", str(tmp_path / "absent.json")])
    assert result.exit_code == 2
    assert "absent.json cannot be read" in result.output


def test_a_job_begins_with_the_profile_and_goes_on_with_what_it_measures():
    plain = {"actor": Parallelism(pp=2), "critic": Parallelism(pp=2)}
    layouts, counts = shared_layouts(plain, reverse=True), {"actor": 2, "critic": 2}
    times = Times()
    times.assume(profile(actor=model(), critic=model(scale=0.5)), layouts, 2)
    assert (times.profiled, times.measured) == (True, False)
    problem = training_problem(layouts, counts, 1, times)
    # Three layers a stage of 2 seconds each for a micro-batch of 2; embedding and head beside.
    assert problem.array(0, "forward")[:, 0].tolist() == pytest.approx([6.2, 7.0])
    assert problem.array(1, "forward")[:, 0].tolist() == pytest.approx([3.1, 3.5])
    assert problem.communication == pytest.approx(0.25 + 2 * 16 * 8 * 4 / 1024)

    def part(rank: int, name: str, transfer: float | None) -> StageTimes:
        return StageTimes(
            rank=rank, model=name, seconds={"F": [1.0] * 2, "B": [4.0] * 2}, activation=[8.0] * 2, transfer=transfer
        )

    # The critic's first stage is on rank 1; its messages go the other way over the same edge.
    seen = [part(0, "actor", 0.5), part(1, "actor", None), part(0, "critic", None), part(1, "critic", 0.75)]
    times.add(seen, layouts)
    measured = training_problem(layouts, counts, 1, times)
    assert measured.array(0, "forward").tolist() == [[1.0, 1.0]] * 2
    assert measured.latencies[0, 1] == measured.latencies[1, 0] == 0.75
    # Halves that were never run: the profile's shares of what was measured.
    first, second = (measured.array(0, field)[1] for field in ("input_gradient", "weight_gradient"))
    assert first == pytest.approx([4 * 0.5, 4 * 0.5], rel=0.1)
    assert first + second == pytest.approx([4 * 1.1] * 2)


def test_a_profile_of_other_models_is_refused():
    with pytest.raises(ProblemError, match="the profile has no critic, only actor"):
        Times().assume(profile(actor=model()), {m: Parallelism(pp=2) for m in ("actor", "critic")}, 2)
