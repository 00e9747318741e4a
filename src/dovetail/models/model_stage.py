"""Defines one pipeline stage of a causal language model: a contiguous range of Hugging Face's own layers.

Parameters have the same names as in the Hugging Face checkpoint of the whole model
(`model.layers.3.mlp.up_proj.weight`). So weights, optimizer state and exports need no translation, and do not depend on
the pipeline split."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.models.config import ModelError, family_facts, is_tied, without_dropout
from dovetail.models.layers.expert_routing import replays
from dovetail.models.layers.packing import LayerCalls, Packing, Past
from dovetail.models.layers.predictions import Predicted, Predictions, Vocabulary, predict
from dovetail.models.layers.token_ranks import ALONE, TokenRanks
from dovetail.protocol.plan import stages_at
from dovetail.protocol.weights import LayoutError, layer_range

VALUE_HEAD = "score"
# A field in the config.json of a model with a value head. It is added to every value. It cannot be a weight, because
# transformers' `score` has no bias. transformers ignores the field, and so its scores all differ by the same number.
SCORE_BIAS = "score_bias"
# The file of the value head, in a subfolder of a language model's folder. vLLM reads all weights in the folder itself,
# and must not read this one.
VALUE_HEAD_FILE = "value_head/model.safetensors"


class Outputs(NamedTuple):
    """The outputs of a last stage with both heads. `logits`: (..., V) in the compute dtype, or the predictions that
    were asked for in their place. `values`: (...) float32."""

    logits: Tensor | Predicted
    values: Tensor


class PipelineStage(nn.Module):
    """Stage `pp_rank` of `pp_size`, built on the meta device (see `dovetail.models.build`).

    Tied embeddings: with one stage the head uses the embedding's weight, and there is no parameter `lm_head`. With more
    stages the last one holds a copy, `lm_head.weight`. It stays equal to the first stage's
    `model.embed_tokens.weight`, because the trainer sums the two gradients and gives the sum to both (`tied_copy`). A
    family's own name of the embedding is kept.

    Head `value` is `score`, a linear map without bias from the final hidden state to one number. It has the name and
    shape of transformers' `...ForSequenceClassification` with `num_labels=1`. The configuration's `score_bias` is added
    if there is one. Head `lm+value` gives both heads on one body.

    With several `chunks` it holds this many of the chunks * pp_size stages. The stages go from the first rank to the
    last and back again (`dovetail.protocol.plan.stage_path`). With `loop` each chunk goes from the first rank to the
    last. A rank that holds both ends of the model has both halves of a tied pair, so that the order of the two stages'
    passes changes no bit of their sum.

    If context-parallel ranks share the tokens of a pass (`share_tokens`), inputs, outputs, `wanted` and `routing` are
    those of this rank's tokens, and `lengths` those of all.

    Dropout is off. Training and evaluation mode differ only in the adapters' dropout."""

    def __init__(
        self, config: Any, head: Head, pp_rank: int = 0, pp_size: int = 1, chunks: int = 1, loop: bool = False
    ) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.config = config
        self.head: Head = head
        lm, value = head != "value", head != "lm"
        self.pp_rank, self.pp_size = pp_rank, pp_size
        self.ranks = ALONE
        self._last_stage = chunks * pp_size - 1
        # The stages that this rank holds, in their order.
        self.stages = stages_at(pp_rank, pp_size, chunks, loop)
        self.is_first, self.is_last = 0 in self.stages, self._last_stage in self.stages
        self.family = family_facts(config)
        try:
            self.chunk_layers = [layer_range(config.num_hidden_layers, s, self._last_stage + 1) for s in self.stages]
        except LayoutError as error:
            raise ModelError(str(error)) from error
        self.layer_ids = [layer for layers in self.chunk_layers for layer in layers]
        self.hidden_size = int(config.hidden_size)
        self.score_bias = float(getattr(config, SCORE_BIAS, 0.0)) if head == "value" else 0.0
        with torch.device("meta"):
            # Master weights are float32, whatever the files hold. transformers would take the dtype of config.json.
            whole = AutoModelForCausalLM.from_config(
                without_dropout(config), dtype=torch.float32, attn_implementation=self._attention
            )
        source: Any = whole.get_submodule(self.family.body)
        body: Any = nn.Module()
        entry, exits = (self.family.embedding, *self.family.entry), self.family.exits
        if self.family.forward == "layers":
            if self.is_first:
                _take(source, body, entry)
        else:
            body = source
            for name in {*(entry if not self.is_first else ()), *(exits if not self.is_last else ())}:
                if not (self.is_first and name in entry) and not (self.is_last and name in exits):
                    delattr(body, name)
            self._shells = [_Elsewhere(each, self.family.tuples) for each in getattr(source, self.family.layers)]
        mine = nn.ModuleDict({str(i): getattr(source, self.family.layers)[i] for i in self.layer_ids})
        setattr(body, self.family.layers, mine)
        if self.family.experts is not None and self.family.softmax_routers:
            for layer in mine.values():
                replays(layer, self.family.experts)
        self.constants = frozenset(self._constants(mine))
        self.rotary_type = None if getattr(source, "rotary_emb", None) is None else type(source.rotary_emb)
        self.rotary: Any = None
        if self.is_last and self.family.forward == "layers":
            _take(source, body, exits)
        above, _, last = self.family.body.rpartition(".")
        place: nn.Module = self
        for name in above.split(".") if above else ():
            setattr(place, name, nn.Module())
            place = getattr(place, name)
        setattr(place, last, body)
        narrow = self.family.embedding_field
        width = self.hidden_size if narrow is None else int(getattr(config, narrow))
        shares = lm and is_tied(config) and self._last_stage == 0
        if self.is_last and lm and not shares:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False, device="meta")
        if self.is_last and value:
            setattr(self, VALUE_HEAD, nn.Linear(width, 1, bias=False, device="meta"))

    def _constants(self, layers: nn.ModuleDict) -> Iterator[str]:
        """Makes frozen parameters of the buffers that files hold, so that they are read, sent and exported as weights
        are. Yields the names of all such parameters of the layers."""
        for name, module in layers.named_modules():
            saved = module.state_dict(keep_vars=True)
            for leaf, tensor in [*module.named_buffers(recurse=False)]:
                if leaf in saved:
                    del module._buffers[leaf]
                    module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
            for leaf, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    yield f"{self.family.body}.{self.family.layers}.{name}.{leaf}"

    def cast(self, dtype: torch.dtype) -> None:
        """Give all parameters this dtype, except those that no training changes. Routers add them to float32."""
        for name, parameter in self.named_parameters():
            if name not in self.constants:
                parameter.data = parameter.data.to(dtype)

    def share_tokens(self, ranks: TokenRanks, tp: int = 1) -> None:
        """Compute the tokens of this one of `ranks`, on one of `tp` tensor-parallel ranks. Raises `ModelError` if the
        model's layers or heads do not allow it."""
        if ranks.size > 1 and (why := ModelShape.of(self.config.to_dict()).share_problem(ranks.size, tp)) is not None:
            raise ModelError(f"cp is {ranks.size}, {why}")
        self.ranks = ranks

    @property
    def body(self) -> Any:
        """The module that holds embeddings, layers and final norm. It has the same name as in the whole model."""
        return self.get_submodule(self.family.body)

    @property
    def layers(self) -> nn.ModuleDict:
        """This rank's layers by their numbers."""
        found: nn.ModuleDict = getattr(self.body, self.family.layers)
        return found

    @property
    def _attention(self) -> str | None:
        """The implementation of attention. None is the best of the model's own that this torch has."""
        from dovetail.models.layers.attention import NAME

        return None if self.family.forward == "own" else NAME

    @property
    def embedding_name(self) -> str:
        """The name of the input embedding's weight in the whole model."""
        return f"{self.family.body}.{self.family.embedding}.weight"

    @property
    def tied_copy(self) -> str | None:
        """The name of this stage's parameter that is one half of a tied pair in two stages, or None. If both halves are
        here, it is the head's."""
        if self.head == "value" or not is_tied(self.config) or self._last_stage == 0:
            return None
        return "lm_head.weight" if self.is_last else self.embedding_name if self.is_first else None

    @property
    def beside_policy(self) -> str | None:
        """The name of this stage's parameter that does not belong to the trained language model, or None."""
        return f"{VALUE_HEAD}.weight" if self.head == "lm+value" and self.is_last else None

    def begins(self, chunk: int = 0) -> bool:
        """Whether a chunk takes token ids."""
        return self.stages[chunk] == 0

    def ends(self, chunk: int = 0) -> bool:
        """Whether a chunk has the head."""
        return self.stages[chunk] == self._last_stage

    def checkpoint_name(self, name: str) -> str:
        """The name of this stage's parameter `name` in the whole model's checkpoint. For the last stage's tied copy it
        is the embedding's name. Otherwise it is `name`."""
        return self.embedding_name if name == "lm_head.weight" and self.tied_copy == name else name

    def place_buffers(self, device: torch.device | str) -> None:
        """Make the buffers that no checkpoint holds, on `device`: the rotary frequencies (float32), and the factor of a
        scaled embedding. Where transformers' body computes, all are those that it makes itself."""
        if self.family.forward != "layers":
            self._remake_buffers(device)
            return
        for module in self.modules():
            if hasattr(module, "scalar_embed_scale"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)
        if self.rotary_type is not None:
            with torch.device(device):
                # It is no submodule, so that it stays float32 and is not in the stage's state dict.
                object.__setattr__(self, "rotary", {theta: self._rotary(theta) for theta in {*self._thetas}})

    def _remake_buffers(self, device: torch.device | str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        if not any(True for _ in self.buffers()):
            return
        with no_init_weights(), torch.device("cpu"):  # its weights are never touched, so they take no memory
            whole = AutoModelForCausalLM.from_config(
                without_dropout(self.config), dtype=torch.float32, attn_implementation=self._attention
            )
        mine = dict(self.named_modules())
        for name, buffer in whole.named_buffers():
            owner, _, leaf = name.rpartition(".")
            if owner in mine and leaf in mine[owner]._buffers:  # others are of other stages
                mine[owner]._buffers[leaf] = buffer.to(device)

    @property
    def _thetas(self) -> Sequence[float | None]:
        """The base of each layer's rotary positions, if layers have different ones. Layers of base 0 have none."""
        return getattr(self.config, "layer_rope_theta", None) or [None] * self.config.num_hidden_layers

    def _rotary(self, theta: float | None) -> Any:
        config = copy.copy(self.config)
        if theta is not None:
            config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
        return None if theta == 0 else self.rotary_type(config=config)  # type: ignore[misc]

    def forward(
        self,
        inputs: Tensor,
        lengths: Sequence[int] | None = None,
        wanted: Tensor | None = None,
        prefixes: Sequence[int | None] | None = None,
        routing: Tensor | None = None,
        predictions: Predictions | None = None,
        balance: float = 0.0,
        pasts: Sequence[Past | None] | None = None,
        chunk: int = 0,
    ) -> Tensor | Predicted | Outputs:
        """Runs a stage. Attention is causal. `chunk`: the index of the stage among those of this rank.

        `inputs` are token ids, int64, for the first stage. For others they are the output of the stage before. With
        `lengths` they are (1, total) or (1, total, H), and hold sequences of these lengths, one after another. A
        sequence may continue another one (`prefixes`: see `dovetail.models.layers.packing`). Without `lengths` they are
        (B, T) or (B, T, H), and every row is a sequence with padding on the right. Outputs at padding mean nothing.

        `routing`, (total, layers of the whole model, experts of a token) integers, has the experts to use. -1 lets the
        model choose. `balance` is the factor of the mean of all layers' load-balancing losses in the gradients
        (`dovetail.models.layers.expert_routing`). `pasts` has for each sequence the KV cache that it continues and adds
        to, or None. They need a pass without gradients.

        Returns hidden states (B, T, H). The last stage returns logits (B, T, V) in the compute dtype (head `lm`),
        values (B, T) float32 (head `value`), or both. `wanted`, (n,) int64: positions among all B x T. With it only
        their outputs are returned, (n, V) or (n,). `predictions` needs `wanted`, and its results take the place of
        logits."""
        device = inputs.device
        if lengths is None:
            longest = inputs.shape[1]
            positions = torch.arange(longest, device=device).unsqueeze(0)
            layout = LayerCalls([positions], {})
        else:
            packing = Packing(lengths, prefixes, device, pasts, self.ranks)
            longest, positions = packing.longest, packing.positions.unsqueeze(0)
            layout = packing.packed() if self.family.packs else packing.rows(self._together)
        if self.family.forward != "layers":
            self._check_length(longest)
            rows = zip(layout.spread(inputs), layout.positions, strict=True)
            hidden = layout.joined([self._through_body(*each, layout.arguments, chunk) for each in rows])
            return hidden if not self.ends(chunk) else self._head(_wanted(hidden, wanted), predictions)
        hidden = self._embed(inputs, positions, longest) if self.begins(chunk) else inputs
        parts = layout.spread(hidden)
        share = {"balance": balance / self.config.num_hidden_layers} if balance else {}
        extras = [{**layout.arguments, **share} for _ in parts]
        rotations = [self._rotations(*each) for each in zip(parts, layout.positions, strict=True)]
        given = [None] * len(parts) if routing is None else layout.spread(routing.unsqueeze(0))
        for number in self.chunk_layers[chunk]:
            layer = self.layers[str(number)]
            for at, (extra, turned, chosen) in enumerate(zip(extras, rotations, given, strict=True)):
                if turned:
                    extra["position_embeddings"] = turned.get(self._kind(number))
                if chosen is not None:
                    extra["routing"] = chosen.flatten(0, 1)[:, number]
                parts[at] = layer(parts[at], attention_mask=None, position_ids=layout.positions[at], **extra)
        hidden = layout.joined(parts)
        if not self.ends(chunk):
            return hidden
        return self._head(_wanted(hidden, wanted), predictions)

    def _through_body(self, inputs: Tensor, positions: Tensor, extra: dict[str, Any], chunk: int) -> Tensor:
        """The output of a chunk's last layer, from transformers' own forward pass of the body. Layers of other stages
        do nothing in it, and nothing is done before a stage's first layer and after its last one."""
        body, numbers = self.body, self.chunk_layers[chunk]
        takes = inspect.signature(type(body).forward).parameters
        first = _Edge(self.layers[str(numbers[0])], None if self.begins(chunk) else inputs)
        line: list[Any] = list(self._shells)
        for number in numbers:
            line[number] = self.layers[str(number)]
        line[numbers[0]] = first
        last = first if len(numbers) == 1 else _Edge(line[numbers[-1]], None)
        line[numbers[-1]] = last
        absent = _Absent(self.hidden_size)
        both = {*self.family.entry} & {*self.family.exits} if self.begins(chunk) else set()
        shadows: dict[str, Any] = {self.family.layers: line}
        shadows |= {name: absent for name in self.family.exits if name not in both}
        if not self.begins(chunk):
            shadows |= dict.fromkeys((self.family.embedding, *self.family.entry), absent)
        given = {"input_ids": inputs} if self.begins(chunk) else {"inputs_embeds": inputs}
        if "position_ids" in takes:
            given["position_ids"] = positions.expand(inputs.shape[:2])
        if "use_cache" in takes:
            given["use_cache"] = False
        vars(body).update(shadows)
        try:
            body(**given, **extra)
        finally:
            for name in shadows:
                del vars(body)[name]
        return last.output

    @property
    def _together(self) -> bool:
        """Whether layers that cannot tell packed sequences apart get all of them as rows of one call. Ranks that share
        weights exchange these, or tokens, at each call, so they must make equally many. On a CPU many calls are as fast
        as one."""
        return any(p.device.type != "cpu" or hasattr(p, "placements") for p in self.parameters())

    def _kind(self, layer: int) -> tuple[float | None, str | None]:
        """The base of a layer's rotary positions, and the kind of its attention if each kind has its own. None for what
        all layers share."""
        theta = self._thetas[layer]
        return theta, self.config.layer_types[layer] if hasattr(self.rotary[theta], "layer_types") else None

    def _rotations(self, hidden: Tensor, positions: Tensor) -> dict[Any, Any]:
        """The cosines and sines of the positions, by `_kind`. It is empty if positions are learnt."""
        if self.rotary is None:
            return {}
        kinds = {self._kind(layer) for layer in self.layer_ids}
        return {
            (theta, kind): rotary(hidden, positions, *(() if kind is None else (kind,)))
            for theta, kind in kinds
            if (rotary := self.rotary[theta]) is not None
        }

    def _embed(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        body = self.body
        hidden: Tensor = getattr(body, self.family.embedding)(tokens)
        if self.family.embedding_factor is not None:
            hidden = hidden * getattr(self.config, self.family.embedding_factor)
        if "norm" in self.family.entry:
            hidden = body.norm(hidden)
        if not self.family.learnt_positions:
            return hidden
        self._check_length(longest)
        if hasattr(body, "project_in"):
            hidden = body.project_in(hidden)
        return hidden + body.embed_positions(None, position_ids=positions)

    def _check_length(self, longest: int) -> None:
        if self.family.learnt_positions and longest > self.config.max_position_embeddings:
            raise ModelError(
                f"a sequence of {longest} tokens is longer than the model's "
                f"max_position_embeddings, {self.config.max_position_embeddings}"
            )

    def _head(self, hidden: Tensor, predictions: Predictions | None) -> Tensor | Predicted | Outputs:
        body = self.body
        for name in self.family.exits:
            if hasattr(body, name):
                hidden = getattr(body, name)(hidden)
        if self.head == "lm":
            return self._predicted(hidden, predictions)
        # A matrix-vector product replaces `score(hidden).squeeze(-1)`, as FSDP2 allows no view as a module's output.
        values: Tensor = (hidden @ getattr(self, VALUE_HEAD).weight[0]).float()
        if self.score_bias:
            values = values + self.score_bias
        return values if self.head == "value" else Outputs(self._predicted(hidden, predictions), values)

    def _predicted(self, hidden: Tensor, predictions: Predictions | None) -> Tensor | Predicted:
        head = self.lm_head if hasattr(self, "lm_head") else getattr(self.body, self.family.embedding)
        if self.family.logit_factor is not None:
            factor = getattr(self.config, self.family.logit_factor) or 1.0
            hidden = hidden / factor if self.family.logit_factor == "logits_scaling" else hidden * factor
        bound = getattr(self.config, self.family.softcap, None) if self.family.softcap else None
        vocabulary = Vocabulary(head.weight, bound)
        return vocabulary.logits(hidden) if predictions is None else predict(hidden, vocabulary, predictions)


class _Elsewhere:
    """Stands in transformers' body for a layer of another stage. It has the layer's settings, and hands on what it
    gets."""

    def __init__(self, layer: nn.Module, tuples: int) -> None:
        vars(self).update({name: value for name, value in vars(layer).items() if not name.startswith("_")})
        self._tuples = tuples

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states, *[None] * (self._tuples - 1)) if self._tuples else hidden_states


class _Edge:
    """Stands in transformers' body for a stage's first or last layer. The layer gets `given` in place of its hidden
    states, and its output is kept."""

    def __init__(self, layer: Any, given: Tensor | None) -> None:
        self._layer, self._given = layer, given
        self.output: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden_states: Tensor, *more: Any, **others: Any) -> Any:
        found = self._layer(hidden_states if self._given is None else self._given, *more, **others)
        self.output = found[0] if isinstance(found, tuple) else found
        return found


class _Absent:
    """Stands in transformers' body for an embedding, which then is 0, or a norm, which does nothing."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, values: Tensor, *_: Any, **__: Any) -> Tensor:
        if values.is_floating_point():
            return values
        return torch.zeros(*values.shape, self._width, device=values.device)


def _wanted(hidden: Tensor, wanted: Tensor | None) -> Tensor:
    return hidden if wanted is None else hidden.flatten(0, 1)[wanted]


def _take(source: nn.Module, body: nn.Module, names: Sequence[str]) -> None:
    """Put the modules `names` of `source` into `body`, as far as `source` has them."""
    for name in names:
        if (module := getattr(source, name)) is not None:
            setattr(body, name, module)
