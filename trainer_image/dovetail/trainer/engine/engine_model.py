"""One model that this rank trains: its stage, optimizer and weights, and the part of the weights that it sends. No rank
gathers the parts of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dovetail.gpus.kernels import can_compile
from dovetail.manifest.model_shape import Head
from dovetail.manifest.training_types import Optimizer
from dovetail.manifest.types import RLHFJobSpec, Stage, TrainedModel
from dovetail.models import ModelError, PipelineStage, load_config
from dovetail.models.build import fill, local_part, open_source
from dovetail.models.compiled import compile_layers
from dovetail.models.layers.expert_ranks import divide_experts
from dovetail.models.recompute import recompute
from dovetail.models.tensor_parallel import NOTHING, TensorSplit, split_stage
from dovetail.models.transfer import Part
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.plan import loops
from dovetail.protocol.weights.buckets import layer_of
from dovetail.protocol.weights.layout import StageRanks
from dovetail.trainer import compat
from dovetail.trainer.communication.groups import Groups, ModelGroups, peer_errors
from dovetail.trainer.engine import lora
from dovetail.trainer.engine.optim import AdamW, local
from dovetail.trainer.engine.parallel import compute_dtype, is_replicated, is_sharded, shard


@dataclass
class EngineModel:
    """`module` is this rank's stage, `compute` the dtype of activations, and `config` the Hugging Face configuration.

    With `replicated` every data-parallel rank holds the whole stage. With `by_layer` the data-parallel ranks gather the
    weights layer by layer in each pass (ZeRO-3). `split` says which parameters are split among tensor-parallel
    ranks."""

    name: str
    ref: ModelRef
    trained: TrainedModel
    module: PipelineStage
    groups: ModelGroups
    optimizer: AdamW
    compute: torch.dtype
    replicated: bool = False
    split: TensorSplit = NOTHING
    by_layer: bool = False

    @classmethod
    def build(
        cls,
        name: str,
        ref: ModelRef,
        trained: TrainedModel,
        optimizer: Optimizer,
        total_steps: int,
        groups: ModelGroups,
        device: torch.device,
        weights: bool = True,
        always_shard: bool = False,
        checkpointing: bool = False,
        compiling: bool = False,
        by_layer: bool = False,
    ) -> Self:
        """Build the stage on the meta device and shard it. Then read only this rank's rows.

        Without `weights` a fully trained model's parameters stay uninitialised, and a saved checkpoint must fill them.
        Frozen ones are always read. `checkpointing` means activation checkpointing. With `compiling`, layers are
        compiled on GPUs where this is known to work. `by_layer` means ZeRO-3, if there are several ranks to share the
        weights. Raises `ModelError` for a model, adapter or dtype that cannot be trained."""
        compute = compute_dtype(trained.dtype, device)
        places = groups.pp_rank, groups.pp_size, groups.chunks, loops(groups.layout)
        stage = PipelineStage(load_config(ref), ref.head, *places)
        if trained.lora is not None:
            if groups.tp_size > 1 and trained.lora.dropout > 0:
                raise ModelError(f"models.{name}.lora.dropout: ranks that share a layer drop nothing; set it to 0")
            lora.inject(stage, trained.lora)
        stage.share_tokens(groups.token_ranks, groups.tp_size)
        split = split_stage(stage, groups.tp_mesh)
        if groups.ep_mesh is not None:
            if any(".experts.lora_" in n for n, _ in stage.named_parameters()):
                raise ModelError(f"models.{name}.lora.targetModules: adapters on experts need ep 1")
            split = split._replace(experts=divide_experts(stage, groups.ep_mesh))
        if checkpointing:
            recompute(stage)
        elif compiling and device.type == "cuda" and trained.lora is None and split == NOTHING and can_compile():
            compile_layers(stage)
        by_layer = by_layer and groups.dp_mesh.size() > 1
        replicated = is_replicated(stage, compute, device, always_shard or by_layer)
        if not replicated:
            shard(stage, groups, compute, device, by_layer)
        stage.to_empty(device=device)
        frozen = {n for n, p in stage.named_parameters() if not p.requires_grad}
        names = {n: plain for n, _ in stage.named_parameters() if (plain := lora.plain_name(n)) is not None}
        if not weights:
            names = {n: plain for n, plain in names.items() if n in frozen}
        if names:
            fill(stage, open_source(ref, stage), names)
        lora.initialise(stage, ref.seed)
        stage.place_buffers(device)
        stage.eval()
        trainable = {n: p for n, p in stage.named_parameters() if p.requires_grad}
        steps = AdamW(trainable, optimizer, total_steps)
        return cls(name, ref, trained, stage, groups, steps, compute, replicated, split, by_layer)

    def copies(self) -> list[tuple[list[str], dist.ProcessGroup]]:
        """The trained parameters that other ranks hold too, and the ranks that hold them and add up their gradients."""
        experts = [name for name in self.trainable() if name in self.split.experts]
        others = [name for name in self.trainable() if name not in self.split.experts]
        if self.replicated:
            found = [(others, self.groups.replicas), (experts, self.groups.expert_copies)]
        else:
            found = [(others + experts, self.groups.copies)]
        return [(names, group) for names, group in found if names and group and dist.get_world_size(group) > 1]

    @cached_property
    def alone(self) -> bool:
        """Whether FSDP2 shards the stage over this rank alone."""
        return is_sharded(self.module) and self.groups.dp_mesh.size() == 1

    @property
    def head(self) -> Head:
        return self.module.head

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def packs(self) -> bool:
        """Whether its layers know where packed sequences begin."""
        return self.module.family.packs

    @property
    def dp_rank(self) -> int:
        """Which of `dp_size` parts of a batch this rank has. All context-parallel ranks have the same."""
        return self.groups.dp_rank // self.groups.token_ranks.size

    @property
    def dp_size(self) -> int:
        return self.groups.layout.batch_shares

    @property
    def is_first(self) -> bool:
        return self.module.is_first

    @property
    def is_last(self) -> bool:
        return self.module.is_last

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates, by their name in the stage."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def gather(self, instead: dict[str, Tensor] | None = None, beside: bool = False) -> Iterator[tuple[str, Tensor]]:
        """This stage's parameters as (Hugging Face name, whole tensor), with adapters merged.

        The tied copy is left out, and so is a value head beside a language model. With `beside` only this value head is
        given. `instead` holds shards to use in place of parameters. This is collective over dp and tp. Raises
        `PeerLost`."""
        parameters = dict(self.module.named_parameters())
        if (copy := self.module.tied_copy) is not None and copy != self.module.embedding_name:
            del parameters[copy]

        def whole(name: str) -> Tensor:
            parameter = parameters[name]
            shard = instead[name] if instead is not None and name in instead else local(parameter)
            with peer_errors(f"gathering {name} of {self.name}"):
                wrapped: Any = like(parameter, shard)
                return wrapped.full_tensor() if hasattr(wrapped, "full_tensor") else wrapped

        names = [name for name in parameters if (name == self.module.beside_policy) is beside]
        yield from lora.merged(self.module, names, whole)


def tokenizer_folder(ref: ModelRef) -> Path | None:
    """The folder whose tokenizer files belong to an export, or None if there is none."""
    folder = ref.tokenizer or ref.path
    return Path(folder) if folder is not None else None


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """`shard` in the form of the parameter: a DTensor with the same layout, or the tensor itself. It shares the shard's
    memory, even if that is on the host and the parameter is on a GPU."""
    from torch.distributed.tensor import DTensor

    return compat.placed(shard, parameter) if isinstance(parameter, DTensor) else shard


class EngineState:
    """The models of the stage `stage`. `loaded` are the models of all ranks, and `models` those of which this rank
    holds a part. `ema` is this rank's part of the actor's moving average, by parameter name, or empty.

    `step` is the last applied step. The caller sets it after each step, and `restore` sets it."""

    def __init__(self, spec: RLHFJobSpec, groups: Groups) -> None:
        self.spec, self.groups = spec, groups
        self.models: dict[str, EngineModel] = {}
        self.loaded: dict[str, ModelRef] = {}
        self.stage: Stage | None = None
        self.step = 0
        self.ema: dict[str, Tensor] = {}

    def weights(self, model: str) -> Iterator[tuple[str, Tensor]]:
        """This stage's weights as (Hugging Face name, whole tensor), with adapters merged. They are float32 unless the
        parameter has another dtype. `ema` is the averaged actor. This is collective over dp: every dp rank must exhaust
        the iterator. Raises ValueError for `ema` without an averaged actor."""
        if model == "ema":
            if not self.ema:
                raise ValueError("there is no averaged actor; set ppo.ema")
            return self.models["actor"].gather(self.ema)
        return self.models[model].gather()


def senders(held: EngineModel, most: int) -> StageRanks | None:
    """The layout in which at most `most` of the stage's first dp ranks together hold its tensors, or None if more ranks
    share them."""
    sharded, tp = is_sharded(held.module), held.groups.tp_size
    pipelines = getattr(held.groups.layout, "pipelines", 1)
    shards = held.groups.dp_size // pipelines if sharded else 1
    together = max(shards, held.groups.layout.ep)
    ranks = min(held.groups.dp_size, most // tp) // together * together
    return StageRanks(tp, ranks, ranks // shards, held.groups.layout.ep) if ranks else None


def parts(held: EngineModel, ready: Callable[[list[str]], None] = lambda names: None) -> Iterator[Part]:
    """This rank's part of every tensor of its stage under its Hugging Face name, with adapters merged.

    The tied copy is left out. So is a value head beside a language model, because rollouts do not use it. It is
    collective over dp and tp only if there are adapters.

    `ready(names)` is called before the parameters `names` are read. These are a layer's parameters, or one that is in
    no layer. Raises `PeerLost`."""
    parameters = dict(held.module.named_parameters())
    units: dict[str, list[str]] = {}
    for name in parameters:
        units.setdefault(layer_of(name) or name, []).append(name)
    copy = held.module.tied_copy
    left_out = {copy if copy != held.module.embedding_name else None, held.module.beside_policy}

    def whole(name: str) -> Tensor:
        with peer_errors(f"gathering {name} of {held.name}"):
            parameter: Any = parameters[name].detach()
            return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter

    for unit in units.values():
        ready(unit)
        for name in unit:
            plain = lora.plain_name(name)
            if plain is None or name in left_out:
                continue
            mine, place = local_part(parameters[name])
            shape = tuple(parameters[name].shape)
            update = lora.delta(held.module, name, whole)
            if update is not None:
                mine = (mine.float() + update[place]).to(mine.dtype)
            box = tuple((side.start, side.stop) for side in place)
            yield Part(plain, shape, box, mine, held.split.shared.get(name), name in held.split.experts)
