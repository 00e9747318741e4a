"""Reference, reward and critic forward passes over finished samples. No I/O but model loading; not
thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.models.predictions import Predicted, Predictions
from dovetail.protocol.budgets import SCORER_CPU_TOKENS, SCORER_LOGIT_BYTES, SCORER_TOKENS
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.wire import Arrays
from dovetail.rollout.scoring.host_weights import Copies, HostModels
from dovetail.rollout.scoring.packed_samples import Pack, SamplesToScore, packs
from dovetail.rollout.scoring.split import SplitModel, StagePass, build_split

Model = Literal["reference", "reward", "critic"]
MODELS: tuple[Model, ...] = get_args(Model)
HEADS: dict[Model, str] = {"reference": "lm", "reward": "value", "critic": "value"}

# On CPUs a forward pass is filled up to a multiple of this many tokens, and so are the outputs that are read: a float32
# matrix product then gives each row the same bits however many there are and wherever it is. Attention runs sequence by
# sequence. So a sample's scores are the same to the last bit whatever it is scored with, and neither inter-stage fusion
# nor the number of scorers changes a run.
ROWS = 16


class NotReady(Exception):
    """A model that was asked for is not loaded, or lost its weights in a failed transfer."""


def filled(values: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    """(n,) with zeros behind, (a multiple of `multiple`,)."""
    return np.pad(values, (0, -len(values) % multiple))


def _read(found: Tensor | Predicted, rows: NDArray[np.int64]) -> Tensor:
    """(m,) float32: values (n,) in the rows, or what was asked for of them."""
    if isinstance(found, Predicted):
        return found.logprobs
    return found.float()[torch.from_numpy(rows).to(found.device, non_blocking=True)]


class ModelScorer:
    """Holds up to three models and runs them. `progress` is called with (model, tokens) after each forward pass; a
    prompt that samples share counts once.

    `devices`: all of one type. A model is on the first of them, or split by layers over as many of them as `split` says
    (None: over all). `copies`, one a device: the weights are in host memory, and on the devices from `bring` or their
    first use until `leave`."""

    def __init__(
        self,
        devices: torch.device | str | Sequence[torch.device | str] = "cpu",
        dtype: torch.dtype = torch.float32,
        max_tokens: int = SCORER_TOKENS,
        progress: Callable[[str, int], None] = lambda model, tokens: None,
        copies: Sequence[Copies] | None = None,
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

    @property
    def device(self) -> torch.device:
        """The first one, where new weights arrive."""
        return self.devices[0]

    @property
    def place(self) -> str:
        """All devices in words."""
        return ", ".join(map(str, self.devices))

    @property
    def models(self) -> dict[Model, ModelRef]:
        """What is loaded, and from where."""
        return dict(self._refs)

    def load(self, models: Mapping[str, ModelRef]) -> None:
        """Hold exactly these models; one already held from an equal reference stays, with the weights it has.

        Raises ValueError for an unknown name or a wrong head, `dovetail.models.ModelError` for a folder that
        cannot be used; then the models that were to stay, and those built before the bad one, are held."""
        for name, ref in models.items():
            if name not in HEADS:
                raise ValueError(f"unknown model {name!r}; a scorer holds {', '.join(MODELS)}")
            if ref.head != HEADS[name]:
                raise ValueError(f"model {name} needs head {HEADS[name]!r}, not {ref.head!r}")
        wanted = {cast(Model, name): ref for name, ref in models.items()}
        for name in MODELS:
            if name in self._refs and self._refs[name] != wanted.get(name):
                del self._refs[name], self._models[name]
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
        if self.host is not None:
            self.host.hold(name, built.stages)
        return built

    def bring(self) -> list[str]:
        """Begin to copy weights to the device, as far as there is room, and do not wait; the models whose weights are
        there or on their way: all, where weights have no other place."""
        return list(self._refs) if self.host is None else self.host.bring()

    def leave(self) -> None:
        """Take no device memory but for what the process itself needs, if weights have another place."""
        if self.host is not None:
            self.host.leave()

    def require(self, name: Model) -> SplitModel:
        """The loaded model; raises NotReady."""
        if name not in self._models:
            raise NotReady(f"model {name} is not loaded; POST /v1/load first")
        if name == "critic" and self._broken is not None:
            raise NotReady(f"the critic awaits a complete version of its weights: {self._broken}")
        return self._models[name]

    # ------------------------------------------------------------ forward passes

    def score(self, want: Iterable[str], samples: SamplesToScore, temperature: float = 1.0) -> Arrays:
        """`ref_logprobs` (N, R) of the response tokens at `temperature`, `scores` (N,): the reward head at a
        sample's last token, `values` (N, R): the critic's output before each response token. float32, 0
        outside a response; R is the longest response. Raises NotReady, and ValueError for a bad request."""
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
        shape = (len(samples.tokens), int(samples.responses.max(initial=0)))
        result: Arrays = {}
        self.bring()
        for name, model in models:
            if self.host is not None:
                self.host.use(name)
            if name == "reference":
                result["ref_logprobs"] = self._reference(model, samples, shape, temperature)
            elif name == "critic":
                result["values"] = self._critic(model, samples, shape)
            else:
                result["scores"] = self._reward(model, samples)
        return result

    def _passes(
        self,
        name: Model,
        model: SplitModel,
        samples: SamplesToScore,
        wanted: Callable[[Pack], NDArray[np.int64]],
        temperature: float = 1.0,
    ) -> Iterator[tuple[Pack, NDArray[np.float32]]]:
        """Each forward pass: what went through it, and for every position that `wanted` names (m,) its value (m,), or,
        of a language model, the log-probability at `temperature` of the response token after it."""
        # Stages wait the less for the first and the last pass, the smaller these are.
        most = max(1, self.max_tokens // len(model.stages))
        speaks, on_cpu = HEADS[name] == "lm", self.device.type == "cpu"
        outputs = most
        if speaks and on_cpu:
            outputs = max(1, SCORER_LOGIT_BYTES // (self.dtype.itemsize * int(model.config.vocab_size)))
        multiple, enough = (ROWS, SCORER_CPU_TOKENS) if on_cpu else (1, None)

        def forward(pack: Pack) -> StagePass[tuple[Pack, NDArray[np.int64], Tensor]]:
            tokens, lengths, prefixes = filled(pack.tokens, multiple), pack.lengths, pack.prefixes
            if len(tokens) > len(pack.tokens):
                # Token 0 is in every vocabulary.
                lengths, prefixes = (*lengths, len(tokens) - len(pack.tokens)), (*prefixes, None)
            positions, which = np.unique(wanted(pack), return_inverse=True)
            # Several tokens may come after one position, the end of their prompt; they are asked for together.
            order = np.argsort(which, kind="stable") if speaks else np.arange(len(which))
            rows = which[order]

            def asks(device: torch.device) -> Predictions:
                after = samples.tokens[pack.of, samples.prompts[pack.of] + pack.at][order]
                there = torch.from_numpy(after).to(device, non_blocking=True)
                return Predictions(there, temperature, rows=rows)

            def result(found: Tensor | Predicted) -> tuple[Pack, NDArray[np.int64], Tensor]:
                return pack, order, _read(found, rows)

            return StagePass(tokens, lengths, prefixes, filled(positions, multiple), result, asks if speaks else None)

        for pack, order, found in model.run(map(forward, packs(samples, most, outputs, enough))):
            values = np.empty(len(order), np.float32)
            values[order] = found.cpu().numpy()
            yield pack, values
            self._progress(name, len(pack.tokens))

    def _reference(
        self, model: SplitModel, samples: SamplesToScore, shape: tuple[int, int], temperature: float
    ) -> NDArray[np.float32]:
        result = np.zeros(shape, np.float32)
        for pack, logprobs in self._passes("reference", model, samples, lambda pack: pack.before, temperature):
            result[pack.of, pack.at] = logprobs
        return result

    def _critic(self, model: SplitModel, samples: SamplesToScore, shape: tuple[int, int]) -> NDArray[np.float32]:
        result = np.zeros(shape, np.float32)
        for pack, values in self._passes("critic", model, samples, lambda pack: pack.before):
            result[pack.of, pack.at] = values
        return result

    def _reward(self, model: SplitModel, samples: SamplesToScore) -> NDArray[np.float32]:
        result = np.zeros(len(samples.tokens), np.float32)
        for pack, values in self._passes("reward", model, samples, lambda pack: pack.last):
            result[pack.rows] = values
        return result

    # ------------------------------------------------------------ the critic's weights

    def stage_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy a version's tensors aside. Raises NotReady without a critic, ValueError unless they are
        exactly the critic's. Reads the critic's structure only, so that scoring may go on in another
        thread."""
        if "critic" not in self._models:
            raise NotReady("model critic is not loaded; POST /v1/load first")
        expected = self._models["critic"].homes()
        staged: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name not in expected or tensor.shape != expected[name][0]:
                known = tuple(expected[name][0]) if name in expected else "no such tensor"
                raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} came; the critic has {known}")
            # Copied, to the stage that has it: the receiver's buffer is written again.
            device = expected[name][1] if self.host is None else torch.device("cpu")
            staged[name] = torch.empty_like(tensor, dtype=self.dtype, device=device).copy_(tensor)
        missing = sorted(set(expected) - set(staged))
        if missing:
            raise ValueError(f"{len(missing)} of the critic's tensors did not come, first {missing[0]}")
        return staged

    def apply_weights(self, staged: Mapping[str, Tensor], version: int) -> None:
        """Make a complete staged version the critic's. Raises NotReady if the critic was unloaded or replaced
        by one of another shape meanwhile."""
        parameters = dict(self._models["critic"].named_parameters()) if "critic" in self._models else {}
        if {n: p.shape for n, p in parameters.items()} != {n: t.shape for n, t in staged.items()}:
            raise NotReady("the critic was replaced while its weights were coming")
        if self.host is not None:
            self.host.write("critic", staged)
        else:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(staged[name])
        self.critic_version, self._broken = version, None

    def lose_weights(self, reason: str) -> None:
        """After a failed transfer: the critic's weights are out of date, so it scores nothing until others
        come."""
        self.critic_version, self._broken = None, reason
