"""Activation checkpointing: the same bits, and as little memory as the memory model says."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import Dtype, LoRA, Parallelism, ScratchModel, Stage
from dovetail.models import Outputs, PipelineStage, build_stage
from dovetail.models.model_stage import Head
from dovetail.models.recompute import recompute, recomputes
from dovetail.planner.memory import Training, training_memory
from dovetail.protocol.messages import ModelRef
from dovetail.trainer.engine import lora
from dovetail.trainer.engine.action_measures import SavedBytes
from dovetail.trainer.engine.parallel import is_sharded, set_last_backward, shard
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command, ppo_batch, reward_batch, sft_batch

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "intermediate_size": 80, "num_key_value_heads": 2},
    "qwen2": {**COMMON, "intermediate_size": 80, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": {**COMMON, "intermediate_size": 80, "num_key_value_heads": 2, "head_dim": 16},
    "opt": {**COMMON, "ffn_dim": 80, "word_embed_proj_dim": 16},
    # Experts, a window and sinks.
    "gpt_oss": {
        **COMMON,
        "intermediate_size": 16,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
}
CPU = torch.device("cpu")


def made(
    architecture: str,
    again: bool,
    head: Head = "lm",
    place: tuple[int, int] = (0, 1),
    adapters: LoRA | None = None,
    **config: int,
) -> PipelineStage:
    scratch = ScratchModel(architecture=architecture, config=CONFIGS[architecture] | config)  # type: ignore[arg-type]
    stage = build_stage(ModelRef(head=head, scratch=scratch, seed=3), *place)
    stage.requires_grad_(True).train()
    if adapters is not None:
        lora.inject(stage, adapters)
        for name, module in stage.named_modules():
            if ".lora_" in name and isinstance(module, nn.Linear):
                module.to_empty(device="cpu")
        lora.initialise(stage, 3)
        for name, parameter in stage.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.constant_(parameter, 0.01)
    if again:
        recompute(stage)
    return stage


def loss_of(output: Tensor | Outputs) -> Tensor:
    if isinstance(output, Outputs):
        return output.logits.float().logsumexp(-1).sum() + output.values.square().sum()
    return output.float().logsumexp(-1).sum()


def gradients(stages: list[PipelineStage], lengths: list[int]) -> dict[str, Tensor]:
    """Of two micro-batches through the stages, which are cut as the executor cuts them."""
    total = sum(lengths)
    for seed in range(2):
        torch.manual_seed(seed)
        hidden = torch.randint(0, 64, (1, total), generator=torch.Generator().manual_seed(seed))
        passes = []
        for stage in stages:
            inputs = hidden if stage.is_first else hidden.detach().requires_grad_(True)
            wanted = torch.arange(0, total, 2) if stage.is_last else None
            hidden = stage(inputs, lengths, wanted)
            passes.append((inputs, loss_of(hidden) if stage.is_last else hidden))
        gradient = None
        for inputs, output in reversed(passes):
            torch.autograd.backward(output, gradient)
            gradient = inputs.grad
    return {f"{i}.{n}": p.grad for i, s in enumerate(stages) for n, p in s.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert any(bool(value.abs().max() > 0) for value in expected.values())
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("architecture", "lengths"),
    [
        *((architecture, [5, 9, 3]) for architecture in CONFIGS),
        *(pytest.param(a, [6, 6], marks=() if a == "llama" else pytest.mark.nightly) for a in CONFIGS),
    ],
)
def test_gradients_are_the_same_bits_with_and_without_pipeline_stages(architecture: str, lengths: list[int]) -> None:
    for pp in (1, 3):
        plain, again = ([made(architecture, way, place=(i, pp)) for i in range(pp)] for way in (False, True))
        assert [n for s in plain for n, _ in s.named_parameters()] == [
            n for s in again for n, _ in s.named_parameters()
        ]
        assert_same(gradients(again, lengths), gradients(plain, lengths))


def test_a_value_head_beside_the_language_model_is_the_same_too() -> None:
    assert_same(*(gradients([made("llama", way, "lm+value")], [4, 7]) for way in (True, False)))


@pytest.mark.slow
def test_adapters_drop_out_the_same_numbers_again() -> None:
    adapters = LoRA(rank=4, dropout=0.3)
    plain, again = (gradients([made("llama", way, adapters=adapters)], [4, 7]) for way in (False, True))
    assert all(".lora_" in name for name in plain)
    assert_same(again, plain)
    kept = gradients([made("llama", False, adapters=LoRA(rank=4))], [4, 7])
    assert any(not torch.equal(kept[name], value) for name, value in plain.items())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("architecture", "compute"), [("llama", torch.bfloat16), ("llama", torch.float32), ("gpt_oss", torch.float32)]
)
def test_sharded_stages_give_the_same_bits(mesh: DeviceMesh, architecture: str, compute: torch.dtype) -> None:
    groups: Any = SimpleNamespace(tp_size=1, dp_mesh=mesh["dp"])
    cpu: Any = SimpleNamespace(type="sharded")  # one rank in float32 is not sharded on CPUs
    found = []
    for way in (False, True):
        stage = made(architecture, way)
        shard(stage, groups, compute, CPU if compute is torch.bfloat16 else cpu)
        assert is_sharded(stage)
        assert recomputes(stage) is way
        for last in (False, True):
            set_last_backward(stage, last, False)
            tokens = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(int(last)))
            loss_of(stage(tokens, [5, 7])).backward()
        shards: dict[str, Any] = {name: parameter.grad for name, parameter in stage.named_parameters()}
        found.append({name: gradient.full_tensor() for name, gradient in shards.items()})
    assert_same(found[1], found[0])


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside the `with` held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self._seen = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen and size:
            self._seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_memory_is_what_the_model_says(architecture: str) -> None:
    """Kept between the passes: each layer's input. At the peak of the backward pass: one layer's activations more."""
    count, layers = 300, 8
    config = CONFIGS[architecture] | {"num_hidden_layers": layers, "max_position_embeddings": 512}
    if architecture == "opt":
        config |= {"word_embed_proj_dim": 32}
    shape = ModelShape.of({**config, "model_type": architecture})
    peaks, modelled = {}, {}
    for way in (False, True):
        stage = made(
            architecture, way, place=(0, 2), **{k: v for k, v in config.items() if k not in COMMON or k[0] == "n"}
        )
        job = Training(shape, "lm", Parallelism(pp=2), Dtype.FLOAT32, count, recompute=way, gpu=False)
        device = training_memory(job, 0).device
        modelled[way] = device["activations"] + device.get("activations of a layer", 0.0)
        tokens = torch.randint(0, 64, (1, count))
        meter = SavedBytes(stage.parameters())
        with meter:
            stage(tokens)
        assert meter.bytes == pytest.approx(device["activations"], rel=0.05)
        with Live() as live:
            output = stage(tokens)
            output.backward(torch.ones_like(output))
        peaks[way] = live.peak
    assert modelled[True] < modelled[False] / 2.5
    assert peaks[False] - peaks[True] == pytest.approx(modelled[False] - modelled[True], rel=0.1)


STEPS: list[tuple[Stage, list[str], Any]] = [
    (Stage.SFT, ["actor"], sft_batch),
    (Stage.REWARD, ["reward"], reward_batch),
    (Stage.PPO, ["actor", "critic"], ppo_batch),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "models", "batch"), STEPS, ids=[stage.value for stage, _, _ in STEPS])
def test_steps_of_a_trainer_are_the_same_and_hold_less(stage: Stage, models: list[str], batch: Any) -> None:
    with LocalTrainer(job()) as trainer:
        found: list[dict[str, Tensor]] = []
        metrics: list[dict[str, float]] = []
        for again in ([], models):
            trainer.metrics(load_command(stage).model_copy(update={"recompute": again}))
            measured = trainer.metrics(trainer.step(stage, 1, batch(1), models, 4))
            held = trainer.runner.engine.models
            assert [name for name in models if recomputes(held[name].module)] == again
            found.append({f"{m}.{n}": p.detach().clone() for m in models for n, p in held[m].trainable().items()})
            metrics.append(measured)
        assert_same(found[1], found[0])
        bytes_held = [each.pop("activation_peak_bytes") for each in metrics if each.pop("seconds")]
        assert metrics[0] == metrics[1]
        assert bytes_held[1] < bytes_held[0] / 2


def test_a_split_backward_is_refused() -> None:
    with LocalTrainer(job()) as trainer:
        trainer.metrics(load_command(Stage.SFT).model_copy(update={"recompute": ["actor"]}))
        step = trainer.step(Stage.SFT, 1, sft_batch(1), ["actor"], 4)
        halves = [a.model_copy(update={"kind": k}) for a in step.actions[0] for k in ("F" if a.kind == "F" else "IW")]
        refused = trainer.execute(step.model_copy(update={"actions": [halves]}))
        assert refused.error is not None
        assert "splits backwards of actor, which has activation checkpointing" in refused.error
