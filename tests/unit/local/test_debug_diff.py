"""`dovetail debug diff`: the first thing in which two runs differ, whatever differs after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dovetail.cli.main import cli
from dovetail.coordinator.store.experience_files import ExperienceFiles, experience_arrays
from dovetail.coordinator.store.samples import Key, Sample, State
from dovetail.coordinator.store.store import Store
from dovetail.protocol.wire import SampleArrays
from helpers.jobs import tiny_job

ITERATIONS = 3
Change = Callable[[SampleArrays], None]


def write_run(folder: Path, change: Change | None = None, at: int = 2, **spec: object) -> Path:
    """What a run leaves that a comparison reads. `change` changes the batch of iteration `at`, and everything that the
    run computes after it is other, too."""
    for name in ("samples", "checkpoints", "models"):
        (folder / name).mkdir(parents=True)
    (folder / "job.json").write_text(tiny_job(**spec).model_dump_json(by_alias=True))
    (folder / "plan.json").write_text("{}")
    store, files = Store(folder), ExperienceFiles(folder)
    lines = []
    for iteration in range(1, ITERATIONS + 1):
        other = change is not None and iteration >= at
        arrays = experience_arrays([sample(iteration, prompt, 0) for prompt in range(3)], 0)
        if other and change is not None:
            change(arrays)
        digest = files.write(iteration, arrays)
        store.put_trained(iteration, store.outcome_of(iteration, arrays), {f"ppo/{iteration}/batch": digest})
        metrics = {"loss": 0.5 / iteration + 0.1 * other, "seconds": 1.0 + other}
        lines.append(json.dumps({"stage": "ppo", "step": iteration, "time": 1.0 + other, "metrics": metrics}))
    store.close()
    (folder / "history.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def sample(iteration: int, prompt: int, number: int) -> Sample:
    tokens = np.arange(10 * iteration + prompt, 10 * iteration + prompt + 4, dtype=np.int32)
    chances = np.linspace(-1, -2, 4, dtype=np.float32)
    key = Key(iteration, prompt, number)
    return Sample(key, State.SCORED, tokens[:2], 7, {}, tokens, chances, finish_reason="stop", reward=0.25 * prompt)


def ask(one: Path, other: Path, *more: str) -> Result:
    return CliRunner().invoke(cli, ["debug", "diff", str(one), str(other), *more])


def test_two_runs_of_the_same_bits(tmp_path: Path) -> None:
    found = ask(write_run(tmp_path / "one"), write_run(tmp_path / "other"))
    assert found.exit_code == 0, found.output
    assert found.output == "All results that both runs keep are the same to the bit, through iteration 3.\n"


def another_token(arrays: SampleArrays) -> None:
    tokens, chances = arrays["tokens"].copy(), arrays["rollout_logprobs"].copy()
    tokens[1, 2 + 3] = 99  # after a prompt of two tokens
    chances[1, 3] = -1.5
    arrays["tokens"], arrays["rollout_logprobs"] = tokens, chances


def another_prompt(arrays: SampleArrays) -> None:
    another_token(arrays)
    tokens = arrays["tokens"].copy()
    tokens[2, 1] = 98
    arrays["tokens"] = tokens


def another_rounding(arrays: SampleArrays) -> None:
    chances = arrays["rollout_logprobs"].copy()
    chances[0, 2] = np.nextafter(chances[0, 2], np.float32(0))
    arrays["rollout_logprobs"] = chances


def another_reward(arrays: SampleArrays) -> None:
    arrays["scores"] = arrays["scores"] + np.array([0, 0, 1], np.float32)


@pytest.mark.parametrize(
    ("change", "first", "evidence"),
    [
        (another_prompt, "prompt of prompt 2, sample 0 (batch of iteration 2)", "token 1 is 23 and 98: "),
        (another_token, "sampled tokens of prompt 1, sample 0 (batch of iteration 2)", "token 3 is 24 and 99: "),
        (
            another_token,
            "sampled tokens of prompt 1, sample 0 (",
            "when they were sampled: -2.000000 and -1.500000 nats",
        ),
        (another_rounding, "log-probabilities of prompt 0, sample 0 (", "at token 2: -1.6666666269302368 and -1.66666"),
        (another_reward, "scores of prompt 2, sample 0 (", "it: 0.5 and 1.5, a difference of 1"),
    ],
)
def test_the_first_difference_is_named_with_evidence(tmp_path: Path, change: Change, first: str, evidence: str) -> None:
    found = ask(write_run(tmp_path / "one"), write_run(tmp_path / "other", change))
    assert found.exit_code == 1
    assert "The same to the bit through iteration 1.\n" in found.output
    assert f"the first difference: {first}" in found.output
    assert evidence in found.output


def test_iterations_whose_batches_are_deleted_are_compared_by_their_record(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "other", another_reward)]
    for run in runs:
        (run / "experience/000002.safetensors").unlink()
    found = ask(*runs)
    assert found.exit_code == 1
    assert "the first difference: rewards (record of iteration 2 (trained))" in found.output


def test_schedules_that_follow_measured_times_are_no_difference(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "other")]
    for run, words in zip(runs, (["FFBB"], ["FBFB"]), strict=True):
        store = Store(run)
        store.put("sft/schedules", [[1, {"family": "serial", "words": words}]])
        store.put("ppo/1/facts", {"kl_coef": 0.05, "train_actor": True, "schedule": {"words": words}})
        store.close()
    found = ask(*runs)
    assert found.exit_code == 0, found.output
    store = Store(runs[1])
    store.put("ppo/1/facts", {"kl_coef": 0.06, "train_actor": True, "schedule": None})
    store.close()
    assert "the first difference: ppo/1/facts" in ask(*runs).output


def test_answers_that_differ_are_shown(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "other")]
    for run, colour in zip(runs, ("grey", "green"), strict=True):
        text = f"It is a long story, so here is the end of it: the {colour} cat sat down"
        row = {"prompt_index": 4, "response": text, "tokens": len(colour), "finish_reason": "stop"}
        (run / "samples/evaluation-000000.jsonl").write_text(json.dumps(row) + "\n")
    found = ask(*runs)
    assert "the first difference: prompt 4, sample 0 (samples/evaluation-000000.jsonl) differs" in found.output
    assert (
        "response: 's the end of it: the grey cat sat down' and 's the end of it: the green cat sat down'"
        in found.output
    )
    assert "tokens: 4 and 5" in found.output
    assert "finish_reason" not in found.output


def test_settings_come_first(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    found = ask(one, write_run(tmp_path / "other", another_token, seed=4))
    assert found.output.splitlines()[0] == "Setting: spec.seed: 3 and 4"
    assert "the first difference: sampled tokens of prompt 1" in found.output


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    found = ask(tmp_path, tmp_path)
    assert found.exit_code == 1
    assert "has no whole run" in found.output


def with_model(run: Path, changed: int | None = None) -> Path:
    """Give a run the model that drew the samples of iteration 2, with other weights in one of its three layers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, num_hidden_layers=3, **sizes))
    if changed is not None:
        model.model.layers[changed].mlp.down_proj.weight.data += 0.01
    model.save_pretrained(run / "models/actor")
    (run / "models/actor/dovetail.json").write_text(json.dumps({"stage": "ppo", "step": 1}))
    return run


@pytest.mark.parametrize("change", [another_rounding, another_token])
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (1, "layer 1 is the first that differs, by up to "),
        (None, "all 3 layers have the same bits with the weights of both runs"),
    ],
)
def test_a_replay_names_the_first_layer_that_differs(
    tmp_path: Path, change: Change, layer: int | None, said: str
) -> None:
    one, other = with_model(write_run(tmp_path / "one")), with_model(write_run(tmp_path / "other", change), layer)
    found = ask(one, other, "--layers")
    assert found.exit_code == 1
    assert said in found.output
    assert "layer" not in ask(one, other).output


def test_weights_that_are_not_kept_are_named(tmp_path: Path) -> None:
    one, other = with_model(write_run(tmp_path / "one")), write_run(tmp_path / "other", another_rounding)
    assert f"the layer is not known: {other} keeps no" in ask(one, other, "--layers").output
    first = ask(one, write_run(tmp_path / "third", another_rounding, at=1), "--layers").output
    assert f"the layer is not known: no folder holds the weights with which PPO of {one} began" in first
