"""Runs forward passes of reference, reward model and critic over finished and unfinished samples. There is no I/O
except for loading models. It is not thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.models.layers.packing import ROWS, KVCache, Past
from dovetail.models.layers.predictions import Predicted, Predictions
from dovetail.protocol.budgets import SCORER_CPU_TOKENS, SCORER_LOGIT_BYTES, SCORER_TOKENS
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.wire import Arrays
from dovetail.rollout.scoring.host_weights import CudaCopies, HostModels
from dovetail.rollout.scoring.packed_samples import Pack, SamplesToScore, packs
from dovetail.rollout.scoring.prefixes import Prefix, Prefixes, SeenTokens, held_of
from dovetail.rollout.scoring.split import SplitModel, StagePass, build_split

Model = Literal["reference", "reward", "critic"]
MODELS: tuple[Model, ...] = get_args(Model)
HEADS: dict[Model, str] = {"reference": "lm", "reward": "value", "critic": "value"}
# The name of each model's result.
RESULTS: dict[Model, str] = {"reference": "ref_logprobs", "reward": "scores", "critic": "values"}


class NotReady(Exception):
    """A model that was asked for is not loaded, or lost its weights in a failed transfer."""


def filled(values: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    """Pad (n,) with zeros to the next multiple of `multiple`."""
    return np.pad(values, (0, -len(values) % multiple))


def _read(found: Tensor | Predicted, rows: NDArray[np.int64]) -> Tensor:
    """The values (n,) at the rows (m,), or the predictions that the caller asked for. Returns (m,) float32."""
    if isinstance(found, Predicted):
        return found.logprobs
    return found.float()[torch.from_numpy(rows).to(found.device, non_blocking=True)]


class ModelScorer:
    """Holds up to three models and runs them. `progress` is called with (model, tokens) after each forward pass. A
    prompt that samples share counts once.

    `devices`: devices of one type. A model is on the first one, or is split by layers over as many of them as `split`
    says, or over all if `split` is None. With `copies`, one for each device, the weights are in host memory. They are
    on the devices from `bring`, or from their first use, until `leave`."""

    def __init__(
        self,
        devices: torch.device | str | Sequence[torch.device | str] = "cpu",
        dtype: torch.dtype = torch.float32,
        max_tokens: int = SCORER_TOKENS,
        progress: Callable[[str, int], None] = lambda model, tokens: None,
        copies: Sequence[CudaCopies] | None = None,
        split: Mapping[str, int] | None = None,
    ) -> None:
        several = [devices] if isinstance(devices, str | torch.device) else devices
        self.devices = tuple(torch.device(device) for device in several)
        self.dtype, self.max_tokens = dtype, max_tokens
        self._split = dict.fromkeys(MODELS, len(self.devices)) if split is None else dict(split)
        self._progress = progress
        self._refs: dict[Model, ModelRef] = {}
        self._models: dict[Model, SplitModel] = {}
        self._broken: str | None = None
        self.critic_version: int | None = None
        self.host = None if copies is None else HostModels(copies)
        self._prefixes = Prefixes(0)

    @property
    def device(self) -> torch.device:
        """The first device. New weights arrive there."""
        return self.devices[0]

    @property
    def place(self) -> str:
        """The names of all devices."""
        return ", ".join(map(str, self.devices))

    @property
    def models(self) -> dict[Model, ModelRef]:
        """The loaded models and their sources."""
        return dict(self._refs)

    def load(self, models: Mapping[str, ModelRef]) -> None:
        """Hold exactly these models. A model that is already held from an equal reference stays, with its weights.

        Raises ValueError for an unknown name or a wrong head, and `dovetail.models.ModelError` for a folder that cannot
        be used. After an error the scorer holds the models that were to stay, and those that were built before the
        wrong one."""
        for name, ref in models.items():
            if name not in HEADS:
                raise ValueError(f"unknown model {name!r}; a scorer holds {', '.join(MODELS)}")
            if ref.head != HEADS[name]:
                raise ValueError(f"model {name} needs head {HEADS[name]!r}, not {ref.head!r}")
        wanted = {cast(Model, name): ref for name, ref in models.items()}
        for name in MODELS:
            if name in self._refs and self._refs[name] != wanted.get(name):
                del self._refs[name], self._models[name]
                self._prefixes.forget(name)
                if self.host is not None:
                    self.host.forget(name)
        if "critic" not in self._refs:
            self.critic_version, self._broken = None, None
        for name, ref in wanted.items():
            if name not in self._refs:
                self._models[name] = self._build(name, ref)
                self._refs[name] = ref

    def _build(self, name: Model, ref: ModelRef) -> SplitModel:
        built = build_split(ref, self._split.get(name, 1), self.devices, self.dtype, on_host=self.host is not None)
        if self.device.type == "cpu" and built.family.experts is not None:
            from dovetail.models.layers.expert_routing import use_whole_experts

            for stage in built.stages:
                use_whole_experts(stage)
        if self.host is not None:
            self.host.hold(name, built.stages)
        return built

    def bring(self) -> list[str]:
        """Begin to copy weights to the device, as far as there is room, and do not wait. Returns the models whose
        weights are there or on their way. Without `copies` this means all models."""
        return list(self._refs) if self.host is None else self.host.bring()

    def leave(self) -> None:
        """Free the device memory of the weights, if they are also in host memory."""
        self._prefixes.forget()
        if self.host is not None:
            self.host.leave()

    def require(self, name: Model) -> SplitModel:
        """The loaded model. Raises NotReady."""
        if name not in self._models:
            raise NotReady(f"model {name} is not loaded; POST /v1/load first")
        if name == "critic" and self._broken is not None:
            raise NotReady(f"the critic awaits a complete version of its weights: {self._broken}")
        return self._models[name]

    # ------------------------------------------------------------ forward passes

    def score(self, want: Iterable[str], samples: SamplesToScore, temperature: float = 1.0) -> Arrays:
        """Returns float32 arrays that are 0 outside of responses. R is the length of the longest response.
        `ref_logprobs` (N, R) are log-probabilities of the response tokens at `temperature`, in nats. `scores` (N,) are
        the reward head's outputs at a sample's last token, or before it (`_skipped_end`). `values` (N, R) are the
        critic's outputs before each response token. The part of a sample that `begin` has computed is not computed
        again. Raises NotReady, and ValueError for a bad request."""
        models = self._asked(want, samples, temperature)
        prefixes = self._found(samples)
        shape = (len(samples.tokens), int(samples.responses.max(initial=0)))
        result: Arrays = {}
        self.bring()
        try:
            for name, model in models:
                array = np.zeros(shape[:1] if name == "reward" else shape, np.float32)
                self._run(name, model, samples, prefixes, temperature, array)
                result[RESULTS[name]] = array
        finally:
            # After a failed pass too, because its keys and values are incomplete.
            for prefix in prefixes.values():
                self._prefixes.drop(prefix)
        return result

    def begin(self, want: Iterable[str], samples: SamplesToScore, temperature: float = 1.0) -> list[int]:
        """Compute whole blocks of unfinished samples, and keep the results for `score`. Returns for each sample the
        number of response tokens that all models have processed. It is 0 for samples without room, and if layers of a
        model continue no cache. It raises the same errors as `score`."""
        models = self._asked(want, samples, temperature)
        if not all(model.family.packs for _, model in models):
            return [0] * len(samples.tokens)  # such layers continue no cache
        prefixes = self._found(samples)
        parts, kept, used = [], [], 0
        for row in range(len(samples.tokens)):
            prompt, count = int(samples.prompts[row]), held_of(int(samples.responses[row]))
            if not count or used + prompt + count > self._prefixes.room:
                continue
            used += prompt + count
            whole = samples.tokens[row, : prompt + count + 1].copy()
            prefix = prefixes.get(row) or Prefix(whole[:prompt], whole[prompt:])
            prefix.response = whole[prompt:]
            parts.append(row)
            kept.append(prefix)
        if not parts:
            return [0] * len(samples.tokens)
        blocks = np.array([len(prefix.response) for prefix in kept])
        chosen = SamplesToScore(samples.tokens[parts], samples.prompts[parts], blocks, unfinished=True)
        self.bring()
        try:
            for name, model in models:
                self._run(name, model, chosen, dict(enumerate(kept)), temperature, None)
        except BaseException:
            for prefix in kept:
                self._prefixes.drop(prefix)
            raise
        self._prefixes.keep(kept)
        found = dict(zip(parts, (int(n) - 1 for n in blocks), strict=True))
        return [found.get(row, 0) for row in range(len(samples.tokens))]

    @property
    def room(self) -> int:
        """The number of tokens of unfinished samples that are kept."""
        return self._prefixes.room

    @room.setter
    def room(self, tokens: int) -> None:
        self._prefixes.room = tokens

    def _asked(
        self, want: Iterable[str], samples: SamplesToScore, temperature: float
    ) -> list[tuple[Model, SplitModel]]:
        """The models of a request. It raises the same errors as `score`."""
        names = list(dict.fromkeys(want))
        for name in names:
            if name not in HEADS:
                raise ValueError(f"cannot score {name!r}; want any of {', '.join(MODELS)}")
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {temperature}")
        models = [(cast(Model, name), self.require(cast(Model, name))) for name in names]
        for name, model in models:
            vocabulary = int(model.config.vocab_size)
            inside = np.arange(samples.tokens.shape[1]) < samples.lengths[:, None]
            if bool((inside & ((samples.tokens < 0) | (samples.tokens >= vocabulary))).any()):
                raise ValueError(f"tokens are outside model {name}'s vocabulary of {vocabulary}")
        return models

    def _found(self, samples: SamplesToScore) -> dict[int, Prefix]:
        """The kept prefixes of the samples, by row."""
        found: dict[int, Prefix] = {}
        for row, (prompt, whole) in enumerate(zip(samples.prompts, samples.lengths, strict=True)):
            prefix = self._prefixes.find(samples.tokens[row, :prompt], samples.tokens[row, prompt:whole])
            # Two samples may begin with the same tokens.
            if prefix is not None and prefix not in found.values():
                found[row] = prefix
        return found

    def _run(
        self,
        name: Model,
        model: SplitModel,
        samples: SamplesToScore,
        prefixes: Mapping[int, Prefix],
        temperature: float,
        result: NDArray[np.float32] | None,
    ) -> None:
        """Fill `result` (N,) or (N, R). For unfinished samples fill the part that the model has processed, as
        `prefixes` say."""
        if name == "reward" and result is not None and (pad := self._skipped_end()) is not None:
            samples = samples.without_end(pad)
        seen = {row: prefix.models[name] for row, prefix in prefixes.items() if name in prefix.models}
        if name == "reward" and result is not None:
            seen = {row: each for row, each in seen.items() if each.held < samples.responses[row]}
        if HEADS[name] == "lm":
            seen = {row: each for row, each in seen.items() if each.temperature == temperature}
        held = np.zeros(len(samples.tokens), np.int64)
        outputs = np.zeros((len(samples.tokens), int(samples.responses.max(initial=0))), np.float32)
        for row, each in seen.items():
            held[row] = each.held
            if each.outputs is not None:
                outputs[row, : each.held + 1] = each.outputs
        caches = {row: each.cache for row, each in seen.items()}
        rest = np.arange(len(samples.tokens))
        if samples.unfinished:
            caches = {row: caches.get(row) or KVCache() for row in prefixes}
            rest = np.flatnonzero(samples.responses - held > 1)
        part = SamplesToScore(
            samples.tokens[rest], samples.prompts[rest], samples.responses[rest], held[rest], samples.unfinished
        )
        there = {at: caches[row] for at, row in enumerate(rest.tolist()) if row in caches}
        if self.host is not None:
            self.host.use(name)
        at_end = name == "reward"
        for pack, values in self._passes(name, model, part, there, temperature):
            if not at_end:
                outputs[rest[pack.of], pack.at] = values
            elif result is not None:
                result[rest[pack.rows]] = values
        if result is not None:
            if not at_end:
                result[:] = outputs
            return
        for row, prefix in prefixes.items():
            count = int(samples.responses[row])
            mine = None if at_end else outputs[row, :count]
            prefix.models[name] = SeenTokens(caches[row], count - 1, mine, temperature)

    def _skipped_end(self) -> int | None:
        """The token that a text's score does not depend on at its end. None if there is none.

        transformers takes the score of the last token that is not `pad_token_id`, which is often the end token. A
        reward model from elsewhere was trained so. Dovetail trains the score of the last token."""
        path = self._refs["reward"].path
        if path is None or (Path(path) / "dovetail.json").is_file():
            return None
        pad = getattr(self._models["reward"].config, "pad_token_id", None)
        return pad if isinstance(pad, int) else None

    def _passes(
        self,
        name: Model,
        model: SplitModel,
        samples: SamplesToScore,
        caches: Mapping[int, KVCache],
        temperature: float = 1.0,
    ) -> Iterator[tuple[Pack, NDArray[np.float32]]]:
        """Yields the inputs and outputs of each forward pass. A reward model has an output at each sample's last token
        (rows,). The critic has one before each response token (m,). A language model has the log-probability at
        `temperature` of each response token (m,). `caches` has for each row the KV cache of the sample."""
        # The smaller the first and the last pass are, the less the stages wait for them.
        most = max(1, self.max_tokens // len(model.stages))
        speaks, on_cpu = HEADS[name] == "lm", self.device.type == "cpu"
        outputs = most
        if speaks and on_cpu:
            outputs = max(1, SCORER_LOGIT_BYTES // (self.dtype.itemsize * int(model.config.vocab_size)))
        multiple, enough = (ROWS, SCORER_CPU_TOKENS) if on_cpu else (1, None)

        def forward(pack: Pack) -> StagePass[tuple[Pack, NDArray[np.int64], Tensor]]:
            tokens, lengths, prefixes = filled(pack.tokens, multiple), pack.lengths, pack.prefixes
            pasts: list[Past | None] = [None] * len(lengths)
            for row, place in zip(pack.rows.tolist(), pack.places.tolist(), strict=True):
                if row in caches:
                    held = int(samples.begins[row])
                    pasts[place] = Past(caches[row], held and held + int(samples.prompts[row]))
            if len(tokens) > len(pack.tokens):
                # Token 0 is in every vocabulary.
                lengths, prefixes = (*lengths, len(tokens) - len(pack.tokens)), (*prefixes, None)
                pasts.append(None)
            positions, which = np.unique(pack.last if name == "reward" else pack.before, return_inverse=True)
            # Several tokens may come after one position, the end of their prompt. They are asked for together.
            order = np.argsort(which, kind="stable") if speaks else np.arange(len(which))
            rows = which[order]

            def asks(device: torch.device) -> Predictions:
                after = samples.tokens[pack.of, samples.prompts[pack.of] + pack.at][order]
                there = torch.from_numpy(after).to(device, non_blocking=True)
                return Predictions(there, temperature, rows=rows)

            def result(found: Tensor | Predicted) -> tuple[Pack, NDArray[np.int64], Tensor]:
                return pack, order, _read(found, rows)

            return StagePass(
                tokens,
                lengths,
                prefixes,
                filled(positions, multiple),
                result,
                asks if speaks else None,
                tuple(pasts) if caches else None,
            )

        for pack, order, found in model.run(map(forward, packs(samples, most, outputs, enough))):
            values = np.empty(len(order), np.float32)
            values[order] = found.cpu().numpy()
            yield pack, values
            self._progress(name, len(pack.tokens))

    # ------------------------------------------------------------ the critic's weights

    def stage_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy a version's tensors aside. Raises NotReady without a critic, and ValueError if they are not exactly the
        critic's tensors. It reads only the critic's structure, so another thread may score meanwhile."""
        if "critic" not in self._models:
            raise NotReady("model critic is not loaded; POST /v1/load first")
        expected = self._models["critic"].homes()
        staged: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name not in expected or tensor.shape != expected[name][0]:
                known = tuple(expected[name][0]) if name in expected else "no such tensor"
                raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} came; the critic has {known}")
            # The tensor is copied to its stage, because the receiver's buffer is written again.
            _, device, dtype = expected[name]
            home = device if self.host is None else torch.device("cpu")
            staged[name] = torch.empty_like(tensor, dtype=dtype, device=home).copy_(tensor)
        missing = sorted(set(expected) - set(staged))
        if missing:
            raise ValueError(f"{len(missing)} of the critic's tensors did not come, first {missing[0]}")
        return staged

    def apply_weights(self, staged: Mapping[str, Tensor], version: int) -> None:
        """Give the critic a complete staged version. Raises NotReady if the critic was unloaded meanwhile, or replaced
        by a critic of another shape."""
        parameters = dict(self._models["critic"].named_parameters()) if "critic" in self._models else {}
        if {n: p.shape for n, p in parameters.items()} != {n: t.shape for n, t in staged.items()}:
            raise NotReady("the critic was replaced while its weights were coming")
        if self.host is not None:
            self.host.write("critic", staged)
        else:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(staged[name])
        self._prefixes.forget("critic")
        self.critic_version, self._broken = version, None

    def lose_weights(self, reason: str) -> None:
        """Record a failed transfer. The critic's weights are out of date, so it scores nothing until others come."""
        self._prefixes.forget("critic")
        self.critic_version, self._broken = None, reason
