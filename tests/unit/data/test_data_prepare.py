"""`prepare` fills a run directory once, and gives the same batches however often it is asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dovetail.coordinator.data.collection import collect
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.coordinator.data.downloads.model_folders import check_scores
from dovetail.coordinator.data.prepare import Prepared, given_prompt, model_sources, prepare
from dovetail.coordinator.data.text import tokenizer
from dovetail.manifest.types import HubAccess, RLHFJobSpec, Stage
from helpers.model_folder import llama_shapes, write_weights
from helpers.patience import PATIENCE

CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SYNTHETIC = [{"synthetic": {"size": 64}}]


def spec(**changes: Any) -> RLHFJobSpec:
    fields: dict[str, Any] = {
        "models": {"actor": {"source": {"scratch": {"config": CONFIG}}}, "tokenizer": {"train": {"vocabSize": 300}}},
        "data": {"demonstrations": SYNTHETIC, "preferences": SYNTHETIC, "prompts": SYNTHETIC},
        "sft": {"batchSize": 8},
        "reward": {"batchSize": 8},
        "ppo": {"globalBatchSize": 16, "samplesPerPrompt": 2, "miniBatchSize": 16},
        "groups": [{"name": "all", "roles": ["trainer"]}],
    }
    return RLHFJobSpec.model_validate({**fields, **changes})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, Path]:
    run = tmp_path_factory.mktemp("run")
    return prepare(spec(), run, run), run


def test_the_run_directory_is_filled(prepared: tuple[Prepared, Path]) -> None:
    job, run = prepared
    config = json.loads((run / "models/actor-config/config.json").read_text())
    assert config["vocab_size"] == len(job.tokenizer) <= 300
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["pad_token_id"], config["eos_token_id"]) == (job.pad_token_id, job.eos_token_id) == (0, 1)
    assert (run / "tokenizer/tokenizer.json").is_file()
    assert not list(run.rglob("*.tmp"))


def test_preparing_again_changes_nothing(prepared: tuple[Prepared, Path]) -> None:
    job, run = prepared
    files = {p: p.stat().st_mtime_ns for p in run.rglob("*.json")}
    again = prepare(spec(), run, run)
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*.json")} == files
    for step in (1, 7, 30):
        for mine, other in (
            (job.sft_batch(step), again.sft_batch(step)),
            (job.reward_batch(step), again.reward_batch(step)),
        ):
            assert mine.keys() == other.keys()
            assert all(np.array_equal(mine[k], other[k]) for k in mine)
    assert job.prompts(5) == again.prompts(5)


def test_batches(prepared: tuple[Prepared, Path]) -> None:
    job, _ = prepared
    batch = job.sft_batch(1)
    rows = np.arange(len(batch["lengths"]))
    assert batch["tokens"].shape == batch["loss_mask"].shape == (8, batch["lengths"].max())
    assert (batch["tokens"][rows, batch["lengths"] - 1] == job.eos_token_id).all()
    assert set(job.reward_batch(1)) == {"chosen_tokens", "chosen_lengths", "rejected_tokens", "rejected_lengths"}
    assert {k: len(v) for k, v in job.ptx_batch(1).items()} == dict.fromkeys(
        ("ptx_tokens", "ptx_lengths", "ptx_loss_mask"), 16
    )
    assert [job.steps_per_epoch(s) for s in Stage if s is not Stage.DPO] == [8, 8, 8]  # 58 of 64 records, 6 held out
    assert sum(len(b["lengths"]) for b in job.sft_eval_batches()) == 6
    assert sum(len(b["chosen_lengths"]) for b in job.reward_eval_batches()) == 6
    held_out = sum(len(b["lengths"]) for b in job.sft_eval_batches())
    assert sum(len(b["lengths"]) for b in job.scored_demonstrations()) == held_out > 0


def test_transformers_reads_the_folders(prepared: tuple[Prepared, Path]) -> None:
    from transformers import AutoConfig, AutoTokenizer

    job, run = prepared
    config = AutoConfig.from_pretrained(str(run / "models/actor-config"))
    assert (config.hidden_size, config.vocab_size, config.rms_norm_eps) == (32, len(job.tokenizer), 1e-6)
    text = "The cat is small."
    assert AutoTokenizer.from_pretrained(str(run / "tokenizer"))(text).input_ids == job.encoder.encode(text)


@pytest.mark.slow
def test_no_torch_is_imported(tmp_path: Path) -> None:
    """The coordinator's image has none, and where it is installed, importing it takes seconds before a run starts."""
    code = (
        "import json, sys; from pathlib import Path; from dovetail.manifest.types import RLHFJobSpec\n"
        "from dovetail.coordinator.data.prepare import prepare\n"
        "job = prepare(RLHFJobSpec.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]), Path('.'))\n"
        "job.sft_batch(1), job.reward_batch(1), job.prompts(1); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, spec().model_dump_json(by_alias=True), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == "False"


def test_prompts(prepared: tuple[Prepared, Path]) -> None:
    job, _ = prepared
    prompts = job.prompts(1)
    assert [p.index for p in prompts] == list(range(8))
    assert all(job.tokenizer.decode(p.token_ids) == p.text for p in prompts)
    assert len(job.evaluation_prompts()) == 6


def test_an_evaluation_may_have_prompts_of_its_own(tmp_path: Path) -> None:
    """They are read as other prompts are, and the trained ones keep their held-out part."""
    (tmp_path / "exam.jsonl").write_text('{"prompt": "2 + 2 =", "answer": 4}\n{"prompt": "2 + 3 =", "answer": 5}\n')
    job = prepare(spec(evaluation={"prompts": [{"path": "exam.jsonl"}]}), tmp_path / "run", tmp_path)
    assert [(p.index, p.text, p.fields) for p in job.evaluation_prompts()] == [
        (0, "2 + 2 =", {"answer": 4}),
        (1, "2 + 3 =", {"answer": 5}),
    ]


def test_a_tokenizer_may_have_several_chat_templates(tmp_path: Path) -> None:
    """transformers keeps all but the default one in a folder beside it. The folder ended the job, eleven times over."""
    made = tokenizer.train(["hello"], 300)
    made.chat_template = {"default": "{% for m in messages %}[{{ m.content }}]{% endfor %}", "tool_use": "tools"}
    made.save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    actor = {"source": {"scratch": {"config": CONFIG}}}
    changes = {
        "stages": ["ppo"],
        "models": {"actor": actor, "tokenizer": {"path": str(tmp_path / "tokenizer")}},
        "data": {"prompts": [{"path": "chats.jsonl"}], "heldOut": 0},
    }
    for _ in range(2):
        job = prepare(spec(**changes), tmp_path / "run", tmp_path)
        assert job.prompts(1)[0].text == "[hello]"
        assert job.tokenizer.chat_template.keys() == {"default", "tool_use"}


def test_the_first_record_of_each_list_is_shown_with_its_special_tokens(tmp_path: Path) -> None:
    """As the model gets it: a template that is not used, or used twice, can be seen."""
    made = tokenizer.train(["question"], 300)
    made.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"
    made.save_pretrained(str(tmp_path / "tokens"))
    (tmp_path / "sums.csv").write_text("question,answer\n" + "2 + 2?,4\n" * 8)
    (tmp_path / "pairs.json").write_text(json.dumps([{"prompt": "Hi", "chosen": "a", "rejected": "b"}] * 8))
    sums = [{"path": "sums.csv"}]
    models = {"actor": {"source": {"scratch": {"config": CONFIG}}}, "tokenizer": {"path": "tokens"}}
    data = {"demonstrations": sums, "preferences": [{"path": "pairs.json"}], "prompts": sums}
    job = prepare(spec(models=models, data=data), tmp_path / "run", tmp_path)
    assert list(job.first_texts()) == [
        ("demonstrations", "<user>2 + 2?<|eos|><assistant>", "4<|eos|>"),
        ("preferences", "<user>Hi<|eos|><assistant>", "a<|eos|>"),
        ("prompts", "<user>2 + 2?<|eos|><assistant>", ""),
    ]


def test_every_prompt_has_the_fields_that_any_prompt_has(tmp_path: Path) -> None:
    """Else a reward function with an argument `answer` would fail in the first iteration without such a record. A
    function that names its arguments takes no others: those of evaluations do not reach PPO's prompts."""
    (tmp_path / "sums.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "2 + 2 =", "answer": 4}\n')
    (tmp_path / "exam.jsonl").write_text('{"prompt": "c", "unit": "m"}\n{"prompt": "d"}\n')
    changes = {
        "data": {
            "demonstrations": SYNTHETIC,
            "preferences": SYNTHETIC,
            "prompts": [{"path": "sums.jsonl"}],
            "heldOut": 0,
        },
        "ppo": {"globalBatchSize": 2, "samplesPerPrompt": 2, "miniBatchSize": 2},
        "evaluation": {"prompts": [{"path": "exam.jsonl"}]},
    }
    for _ in range(2):  # the second time from the cache
        job = prepare(spec(**changes), tmp_path / "run", tmp_path)
        found = {p.text: p.fields for iteration in (1, 2, 3) for p in job.prompts(iteration)}
        assert found == {"a": {"answer": None}, "b": {"answer": None}, "2 + 2 =": {"answer": 4}}
        exam = job.evaluation_prompts()
        assert [p.fields for p in exam] == [{"unit": "m"}, {"unit": None}]
        rewarded = [{"answer": None, "unit": "m"}, {"answer": None, "unit": None}]
        assert [p.fields for p in job.for_rewards(exam)] == rewarded, "reward functions get what they get in PPO"


def test_model_refs(prepared: tuple[Prepared, Path]) -> None:
    job, _ = prepared
    actor = job.model_ref("actor")
    assert actor is not None
    assert (actor.head, actor.path, actor.tokenizer) == ("lm", None, str(job.tokenizer_dir))
    assert job.model_ref("reward") is None


def write_pairs(folder: Path, count: int) -> None:
    rows = [{"prompt": f"p{i} ", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(count)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))


def collected(tmp_path: Path, **changes: Any) -> dict[str, list[str]]:
    data = collect(spec(**changes), tmp_path, tmp_path / "cache", None)
    lists = {"demonstrations": data.demonstrations, "preferences": data.preferences, "prompts": data.prompts}
    return {
        name: [r.prompt for r in [*part.training_records(), *part.held_out()]] for name, part in lists.items() if part
    }


def test_a_shared_data_set_is_split_disjointly(tmp_path: Path) -> None:
    write_pairs(tmp_path, 100)
    source = [{"path": "pairs.jsonl"}]
    lists = {"demonstrations": source, "preferences": source, "prompts": source}
    got = collected(tmp_path, data={**lists, "split": {"sft": 2, "reward": 4, "ppo": 4}})
    assert {k: len(v) for k, v in got.items()} == {"demonstrations": 20, "preferences": 40, "prompts": 40}
    assert len(set().union(*got.values())) == 100
    # A stage that does not run takes no share.
    got = collected(tmp_path, stages=["sft", "reward"], data={**lists, "split": {"sft": 1, "reward": 1}})
    assert {k: len(v) for k, v in got.items()} == {"demonstrations": 50, "preferences": 50}
    assert not set(got["demonstrations"]) & set(got["preferences"])


def test_a_data_set_of_one_list_is_used_whole(tmp_path: Path) -> None:
    write_pairs(tmp_path, 30)
    got = collected(tmp_path, stages=["reward"], data={"preferences": [{"path": "pairs.jsonl"}]})
    assert sorted(got) == ["preferences"]
    assert len(set(got["preferences"])) == 30


def test_pairs_from_which_nothing_is_learnt_are_told(tmp_path: Path) -> None:
    pairs = [{"prompt": f"p{i}", "chosen": " a", "rejected": " a" if i % 4 == 0 else " b"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    data = {"preferences": [{"path": "pairs.jsonl"}], "heldOut": 0}
    told = prepare(spec(stages=["dpo"], data=data), tmp_path / "run", tmp_path).equal_pairs()
    assert told == (
        "10 of the first 40 pairs have equal replies, perhaps because both are cut at maxTokens; nothing is learnt "
        "from them"
    )
    assert prepare(spec(stages=["reward"]), tmp_path / "good", tmp_path).equal_pairs() == ""
    write_labels(tmp_path, 30)
    labels = {"stages": ["dpo"], "dpo": {"loss": "KTO"}, "data": {"preferences": [{"path": "labels.jsonl"}]}}
    assert prepare(spec(**labels), tmp_path / "labels", tmp_path).equal_pairs() == ""


def write_labels(folder: Path, count: int) -> None:
    rows = [{"prompt": f"p{i} ", "completion": f"c{i}", "label": i % 3 == 0} for i in range(count)]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_responses_with_a_label_make_batches_of_kto(tmp_path: Path) -> None:
    write_labels(tmp_path, 30)
    dpo = {"loss": "KTO", "batchSize": 8}
    data = {"preferences": [{"path": "labels.jsonl"}]}
    job = prepare(spec(stages=["dpo"], dpo=dpo, data=data), tmp_path / "run", tmp_path)
    batch = job.dpo_batch(1)
    assert batch["tokens"].shape[0] == batch["good"].shape[0] == 8
    assert batch["kl_tokens"].shape[0] == 8
    for row, length, good in zip(batch["tokens"], batch["lengths"], batch["good"], strict=True):
        text = job.tokenizer.decode(row[:length], skip_special_tokens=True)
        assert good == (int(text.split("c")[1]) % 3 == 0)
    assert sum(len(held["good"]) for held in job.dpo_eval_batches()) == 3
    assert job.steps_per_epoch(Stage.DPO) == 4


def test_labels_and_pairs_are_not_mixed_up(tmp_path: Path) -> None:
    write_labels(tmp_path, 30)
    write_pairs(tmp_path, 30)
    labels, pairs = {"path": "labels.jsonl"}, {"path": "pairs.jsonl"}
    kto = {"loss": "KTO"}
    for changes, words in (
        ({"stages": ["dpo"], "data": {"preferences": [labels]}}, r"but spec.dpo.loss DPO needs chosen and rejected"),
        ({"stages": ["reward"], "dpo": kto, "data": {"preferences": [labels]}}, "but the reward stage needs chosen"),
        (
            {"stages": ["dpo"], "dpo": kto, "data": {"preferences": [pairs, labels]}},
            r"preferences\[1\] has labels, but spec.data.preferences\[0\] has pairs; give all sources",
        ),
    ):
        with pytest.raises(DataError, match=words):
            collected(tmp_path, **changes)


def test_prompts_of_further_rounds_are_others_and_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(40)))
    ppo = {"globalBatchSize": 16, "samplesPerPrompt": 2, "miniBatchSize": 16, "dynamicSampling": 2}
    models = {"actor": {"source": {"scratch": {"config": CONFIG}}}, "tokenizer": {"train": {}}}
    data = {"prompts": [{"path": "prompts.jsonl"}]}
    job, plain = (
        prepare(spec(stages=["ppo"], ppo=each, data=data, models=models), tmp_path / "run", tmp_path)
        for each in (ppo, {**ppo, "dynamicSampling": 0})
    )
    assert [job.prompts(i) for i in (1, 2)] == [plain.prompts(i) for i in (1, 2)], "the first round is as without"
    known = [p.text for p in job.prompts(1)]
    one, again = (job.further_prompts(1, 1, 3, known) for _ in range(2))
    assert one == again
    assert len({p.text for p in one} | set(known)) == 3 + 8
    other = [job.further_prompts(*each, 3, ()) for each in ((1, 1), (1, 2), (2, 1))]
    assert len({tuple(p.text for p in each) for each in other}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": {"demonstrations": SYNTHETIC, "preferences": SYNTHETIC}},
            "spec.data.prompts is empty, but stage ppo",
        ),
        ({"models": {"tokenizer": {"train": {}}}}, "spec.models.actor.source is missing"),
        ({"models": {"actor": {"source": {"scratch": {}}}}}, "a model from scratch has no tokenizer of its own"),
        (
            {"models": {"actor": {"source": {"path": "nowhere"}}}},
            "spec.models.actor.source.path: .*nowhere is not a folder",
        ),
        ({"models": {"actor": {"source": {"pvc": "c/p"}}}}, "can be read only on a cluster"),
        ({"models": {"actor": {"source": {"path": "pickled"}}}}, "holds only pickled weights"),
        ({"models": {"actor": {"source": {"path": "bare"}}}}, "config.json is missing"),
        (
            {"models": {"actor": {"source": {"scratch": {"config": {"vocab_size": 5}}}}, "tokenizer": {"train": {}}}},
            "vocab_size 5 is less than the tokenizer's",
        ),
        (
            {
                "models": {
                    "actor": {"source": {"scratch": {"config": {"hidden_size": "wide"}}}},
                    "tokenizer": {"train": {}},
                }
            },
            "spec.models.actor.source.scratch.config: hidden_size must be a whole number above 0, not 'wide'",
        ),
        (
            {
                "models": {
                    "actor": {"source": {"scratch": {"config": {"hidden_size": 30, "num_attention_heads": 4}}}},
                    "tokenizer": {"train": {}},
                }
            },
            "hidden_size 30 is not a multiple of num_attention_heads 4",
        ),
        (
            {"models": {"actor": {"source": {"scratch": {}}}, "tokenizer": {"path": "bare"}}},
            "spec.models.tokenizer.path: .*bare holds no tokenizer",
        ),
    ],
)
def test_bad_jobs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    for name in ("pickled", "bare"):
        (tmp_path / name).mkdir()
    (tmp_path / "pickled/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"")
    run = tmp_path / "run"
    with pytest.raises(DataError, match=message) as error:
        prepare(spec(**changes), run, tmp_path)
    assert "\n" not in str(error.value)
    assert not list(run.rglob("*.tmp"))


def test_data_that_leaves_nothing_or_no_share(tmp_path: Path) -> None:
    write_pairs(tmp_path, 3)
    source = [{"path": "pairs.jsonl"}]
    with pytest.raises(DataError, match=r"spec.data.preferences\[0\] leaves stage reward nothing to train on"):
        collected(tmp_path, stages=["reward"], data={"preferences": source, "heldOut": 1.0})
    lists = {"demonstrations": source, "preferences": source}
    with pytest.raises(DataError, match=r"spec.data.split gives stage sft no share of spec.data.demonstrations\[0\]"):
        collected(tmp_path, stages=["sft", "reward"], data={**lists, "split": {"sft": 0}})


def test_a_pretrained_folder(prepared: tuple[Prepared, Path], tmp_path: Path) -> None:
    job, run = prepared
    model = tmp_path / "model"
    model.mkdir()
    job.tokenizer.save_pretrained(str(model))
    (model / "config.json").write_bytes((run / "models/actor-config/config.json").read_bytes())
    config = json.loads((model / "config.json").read_text())
    write_weights(model / "model.safetensors", llama_shapes(config))
    loaded = prepare(spec(models={"actor": {"source": {"path": "model"}}}), tmp_path / "run", tmp_path)
    actor = loaded.model_ref("actor")
    assert actor is not None
    assert (actor.path, actor.scratch) == (str(model.resolve()), None)
    assert len(loaded.tokenizer) == len(job.tokenizer)
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 9}))
    write_weights(model / "model.safetensors", llama_shapes({**config, "vocab_size": 9}))
    with pytest.raises(DataError, match="do not fit the actor's vocabulary of 9"):
        prepare(spec(models={"actor": {"source": {"path": "model"}}}), tmp_path / "run2", tmp_path)


# ---------------------------------------------------------------- data that changed under a run


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def demonstrations(n: int = 20, word: str = "the") -> list[dict[str, Any]]:
    return [{"prompt": f"say {word} {i}", "response": f"{word} {i}"} for i in range(n)]


@pytest.fixture
def with_files(tmp_path: Path) -> RLHFJobSpec:
    write_lines(tmp_path / "demos" / "a.jsonl", demonstrations())
    write_lines(tmp_path / "demos" / "b.jsonl", demonstrations(word="a"))
    write_lines(
        tmp_path / "pairs.jsonl", [{"prompt": f"q {i}", "chosen": "good", "rejected": "bad"} for i in range(20)]
    )
    data = {"demonstrations": [{"path": "demos"}], "preferences": [{"path": "pairs.jsonl"}], "prompts": SYNTHETIC}
    return spec(data=data)


def changed(job: RLHFJobSpec, folder: Path, known: Any) -> str:
    with pytest.raises(DataError) as refused:
        collect(job, folder, folder / "cache", None, known)
    return str(refused.value)


def test_data_that_changed_under_a_run_is_refused_by_name(with_files: RLHFJobSpec, tmp_path: Path) -> None:
    known = json.loads(json.dumps(collect(with_files, tmp_path, tmp_path / "cache", None).fingerprints))
    assert known.keys() == {"spec.data.demonstrations[0]", "spec.data.preferences[0]"}
    collect(with_files, tmp_path, tmp_path / "cache", None, known)

    write_lines(tmp_path / "demos" / "b.jsonl", demonstrations(word="no"))
    message = changed(with_files, tmp_path, known)
    assert message.startswith(f"spec.data.demonstrations[0].path: {tmp_path / 'demos' / 'b.jsonl'} has changed since")
    assert message.endswith("put the old file back, or start a new run")
    (tmp_path / "demos" / "b.jsonl").unlink()
    assert f"{tmp_path / 'demos' / 'b.jsonl'} is gone" in changed(with_files, tmp_path, known)
    # The same content again, another time of modification.
    write_lines(tmp_path / "demos" / "b.jsonl", demonstrations(word="a"))
    collect(with_files, tmp_path, tmp_path / "cache", None, known)
    write_lines(tmp_path / "demos" / "c.jsonl", demonstrations())
    assert f"{tmp_path / 'demos' / 'c.jsonl'} is new" in changed(with_files, tmp_path, known)
    (tmp_path / "demos" / "c.jsonl").unlink()

    pairs = tmp_path / "pairs.jsonl"
    was = pairs.stat()
    pairs.write_text(pairs.read_text().replace("q 3", "q 4"))
    os.utime(pairs, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (pairs.stat().st_size, pairs.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    assert f"spec.data.preferences[0].path: {pairs} has changed" in changed(with_files, tmp_path, known)


def test_data_in_another_folder_is_the_same_data(with_files: RLHFJobSpec, tmp_path: Path) -> None:
    known = collect(with_files, tmp_path, tmp_path / "cache", None).fingerprints
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("demos", "pairs.jsonl"):
        (tmp_path / name).rename(moved / name)
    collect(with_files, moved, tmp_path / "cache", None, known)


def test_the_revision_of_a_hub_data_set_is_asked_for_and_its_commit_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked: list[str | None] = []
    newest = "b" * 40

    def load_dataset(name: str, subset: str | None, *, revision: str | None, **_: Any) -> Any:
        asked.append(revision)
        table = datasets.Dataset.from_list(demonstrations())
        address = f"hf://datasets/{name}@{revision or newest}/data/train.jsonl"
        table.info.download_checksums = {address: {"num_bytes": 1, "checksum": None}}
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def job(revision: str | None = None) -> RLHFJobSpec:
        source = {"huggingFace": "who/what"} | ({"revision": revision} if revision else {})
        return spec(stages=["sft"], data={"demonstrations": [source]})

    known = collect(job("a" * 40), tmp_path, tmp_path, None).fingerprints
    assert asked == ["a" * 40]
    assert known["spec.data.demonstrations[0]"]["commit"] == "a" * 40
    message = changed(job(), tmp_path, known)
    assert f"who/what has changed since the run began: it was at commit {'a' * 40} and is at {newest}" in message
    assert f"set spec.data.demonstrations[0].revision to {'a' * 40}" in message
    collect(job("a" * 40), tmp_path, tmp_path, None, known)


def test_a_prompt_of_ones_own_is_a_text_or_a_record():
    assert given_prompt("hello") == ("hello", {})
    assert given_prompt({"prompt": "hello", "answer": 3}) == ("hello", {"answer": 3})
    for wrong in ({"text": "hello"}, 3, None):
        with pytest.raises(ValueError, match='the text in "prompt"'):
            given_prompt(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no reward model (LlamaForCausalLM), so all its"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}},
            "has 2 labels (id2label of its config.json), but a reward model gives one score",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "has 2 labels (id2label"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, None),
        ({}, None),
    ],
)
def test_a_model_without_scores_is_no_reward_model(config: Any, sentence: str | None, tmp_path: Path) -> None:
    """Before a hub's weights are there."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **config}))
    if sentence is None:
        check_scores(tmp_path, "spec.models.reward.source")
    else:
        with pytest.raises(DataError, match=f"^spec.models.reward.source: .*{re.escape(sentence)}"):
            check_scores(tmp_path, "spec.models.reward.source")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("kind", "head", "sentence"),
    [
        # Loading takes `score.weight`, whatever config.json calls the model.
        ("LlamaForCausalLM", ("score.weight", 1), None),
        ("LlamaForSequenceClassification", ("score.weight", 1), None),
        (
            "LlamaForRewardModel",
            ("v_head.weight", 1),
            "has no score.weight among its weights (LlamaForRewardModel), so",
        ),
        ("LlamaForSequenceClassification", ("score.weight", 3), "has 3 labels (score.weight of its weights), but"),
    ],
)
def test_the_weights_say_whether_a_model_gives_scores(
    kind: str, head: tuple[str, int], sentence: str | None, sharded: bool, tmp_path: Path
) -> None:
    config = {**CONFIG, "model_type": "llama", "vocab_size": 300, "architectures": [kind]}
    matrices = {name: np.ones(shape, np.float32) for name, shape in llama_shapes(config).items()}
    files = {"a": matrices, "b": {head[0]: np.ones((head[1], 32), np.float32)}}
    if sharded:
        for name, tensors in files.items():
            save_file(tensors, tmp_path / f"{name}.safetensors")
        index = {tensor: f"{name}.safetensors" for name, tensors in files.items() for tensor in tensors}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        save_file(files["a"] | files["b"], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    models = {**spec().models.model_dump(by_alias=True), "reward": {"source": {"path": str(tmp_path)}}}
    uses, hub = spec(models=models, stages=["sft", "ppo"]), Hub(HubAccess(), tmp_path)
    assert model_sources(spec(models=models), tmp_path, hub)["reward"] == tmp_path, "the reward stage trains a head"
    if sentence is None:
        assert model_sources(uses, tmp_path, hub)["reward"] == tmp_path
    else:
        with pytest.raises(DataError, match=f"^spec.models.reward.source: .*{re.escape(sentence)}"):
            model_sources(uses, tmp_path, hub)
