"""Reference, reward and critic forward passes over finished samples. No I/O but model loading; not
thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.api.messages import ModelRef
from dovetail.api.wire import Arrays
from dovetail.models import Stage, build_stage
from dovetail.rollout.host_weights import Copies, HostModels

Model = Literal["reference", "reward", "critic"]
MODELS: tuple[Model, ...] = get_args(Model)
HEADS: dict[Model, str] = {"reference": "lm", "reward": "value", "critic": "value"}

MAX_TOKENS = 8192
# A micro-batch's logits stay below this, in the model's dtype; a float32 chunk of them below the second.
# On CPUs samples share a forward pass only with those of their own width, which is rounded up to this: in float32 their
# scores are then the same to the last bit whatever they are scored with (attention's blocks depend on the width). So
# neither inter-stage fusion nor the number of scorers changes a run.
WIDTH = 16
LOGIT_BYTES = 512 * 2**20
CHUNK_BYTES = 4 * 2**20


class NotReady(Exception):
    """A model that was asked for is not loaded, or lost its weights in a failed transfer."""


@dataclass(frozen=True)
class Samples:
    """tokens (N, T) int64, prompt then response, right-padded; prompts, responses: lengths, (N,) int64."""

    tokens: NDArray[np.int64]
    prompts: NDArray[np.int64]
    responses: NDArray[np.int64]

    @staticmethod
    def read(arrays: Arrays) -> Samples:
        """From the arrays of POST /v1/score. Raises ValueError naming the array that is wrong."""
        found = {}
        for name, dimensions in (("tokens", 2), ("prompt_lengths", 1), ("response_lengths", 1)):
            if name not in arrays:
                raise ValueError(f"array {name} is missing")
            array = arrays[name]
            if array.ndim != dimensions or array.dtype.kind not in "iu":
                raise ValueError(
                    f"{name} must be an integer array of {dimensions} dimensions, "
                    f"not {array.dtype} of shape {array.shape}"
                )
            found[name] = array.astype(np.int64)
        tokens, prompts, responses = found["tokens"], found["prompt_lengths"], found["response_lengths"]
        if not len(tokens) == len(prompts) == len(responses):
            raise ValueError("tokens, prompt_lengths and response_lengths must have one row a sample")
        if len(prompts) and prompts.min() < 1:
            raise ValueError("prompt_lengths must be at least 1: the first response token needs a token before it")
        if len(responses) and responses.min() < 0:
            raise ValueError("response_lengths must not be negative")
        if len(prompts) and (prompts + responses).max() > tokens.shape[1]:
            raise ValueError("prompt_lengths + response_lengths exceed the width of tokens")
        return Samples(tokens, prompts, responses)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.prompts + self.responses


def rounded(lengths: NDArray[np.int64], positions: int) -> NDArray[np.int64]:
    """Lengths rounded up to multiples of WIDTH, but not beyond a model's `positions`."""
    up = -(-lengths // WIDTH) * WIDTH
    return np.asarray(np.maximum(lengths, np.minimum(up, positions)), np.int64)


def micro_batches(lengths: Sequence[int] | NDArray[np.int64], max_tokens: int, alike: bool = False) -> list[list[int]]:
    """Indices in micro-batches of like length (`alike`: of equal length), longest first, each at most `max_tokens` once
    padded (or one row)."""
    order = sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i))
    result: list[list[int]] = []
    for i in order:
        if result:
            longest = int(lengths[result[-1][0]])
            if (len(result[-1]) + 1) * longest <= max_tokens and (not alike or lengths[i] == longest):
                result[-1].append(i)
                continue
        result.append([i])
    return result


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `tokens`: (n, V), (n,) -> (n,) float32; as the trainer's
    `gather_logprobs`."""
    step = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
    parts = []
    for start in range(0, len(tokens), step):
        x = logits[start : start + step].float()
        if temperature != 1.0:
            x = x / temperature
        logprobs = torch.log_softmax(x, dim=1)
        parts.append(logprobs.gather(1, tokens[start : start + step, None]).squeeze(1))
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


class Scorer:
    """Holds up to three models and runs them. `progress` is called with (model, tokens) after each
    micro-batch.

    `copies`: the weights are in host memory, and on the device from `bring` or their first use until `leave`."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_tokens: int = MAX_TOKENS,
        progress: Callable[[str, int], None] = lambda model, tokens: None,
        copies: Copies | None = None,
    ) -> None:
        self.device, self.dtype, self.max_tokens = torch.device(device), dtype, max_tokens
        self._progress = progress
        self._refs: dict[Model, ModelRef] = {}
        self._stages: dict[Model, Stage] = {}
        self._broken: str | None = None
        self.critic_version: int | None = None
        self.host = None if copies is None else HostModels(copies)

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
                del self._refs[name], self._stages[name]
                if self.host is not None:
                    self.host.forget(name)
        if "critic" not in self._refs:
            self.critic_version, self._broken = None, None
        for name, ref in wanted.items():
            if name not in self._refs:
                self._stages[name] = self._build(name, ref)
                self._refs[name] = ref

    def _build(self, name: Model, ref: ModelRef) -> Stage:
        if self.host is None:
            return build_stage(ref, device=self.device, dtype=self.dtype)
        stage = build_stage(ref, device="cpu", dtype=self.dtype)
        stage.place_buffers(self.device)
        self.host.hold(name, stage)
        return stage

    def bring(self) -> list[str]:
        """Begin to copy weights to the device, as far as there is room, and do not wait; the models whose weights are
        there or on their way: all, where weights have no other place."""
        return list(self._refs) if self.host is None else self.host.bring()

    def leave(self) -> None:
        """Take no device memory but for what the process itself needs, if weights have another place."""
        if self.host is not None:
            self.host.leave()

    def require(self, name: Model) -> Stage:
        """The loaded model; raises NotReady."""
        if name not in self._stages:
            raise NotReady(f"model {name} is not loaded; POST /v1/load first")
        if name == "critic" and self._broken is not None:
            raise NotReady(f"the critic awaits a complete version of its weights: {self._broken}")
        return self._stages[name]

    # ------------------------------------------------------------ forward passes

    def score(self, want: Iterable[str], samples: Samples, temperature: float = 1.0) -> Arrays:
        """`ref_logprobs` (N, R) of the response tokens at `temperature`, `scores` (N,): the reward head at a
        sample's last token, `values` (N, R): the critic's output before each response token. float32, 0
        outside a response; R is the longest response. Raises NotReady, and ValueError for a bad request."""
        names = list(dict.fromkeys(want))
        for name in names:
            if name not in HEADS:
                raise ValueError(f"cannot score {name!r}; want any of {', '.join(MODELS)}")
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {temperature}")
        stages = [(cast(Model, name), self.require(cast(Model, name))) for name in names]
        for name, stage in stages:
            vocabulary = int(stage.config.vocab_size)
            inside = np.arange(samples.tokens.shape[1]) < samples.lengths[:, None]
            if bool((inside & ((samples.tokens < 0) | (samples.tokens >= vocabulary))).any()):
                raise ValueError(f"tokens are outside model {name}'s vocabulary of {vocabulary}")
        shape = (len(samples.tokens), int(samples.responses.max(initial=0)))
        result: Arrays = {}
        self.bring()
        with torch.inference_mode():
            for name, stage in stages:
                if self.host is not None:
                    self.host.use(name)
                if name == "reference":
                    result["ref_logprobs"] = self._reference(stage, samples, shape, temperature)
                elif name == "critic":
                    result["values"] = self._critic(stage, samples, shape)
                else:
                    result["scores"] = self._reward(stage, samples)
        return result

    def _batches(self, name: Model, stage: Stage, samples: Samples) -> Iterable[tuple[list[int], Tensor, Tensor]]:
        limit = self.max_tokens
        if HEADS[name] == "lm":
            limit = min(limit, max(1, LOGIT_BYTES // (self.dtype.itemsize * int(stage.config.vocab_size))))
        alike = self.device.type == "cpu"
        widths = (
            rounded(samples.lengths, getattr(stage.config, "max_position_embeddings", 0)) if alike else samples.lengths
        )
        for rows in micro_batches(widths, limit, alike):
            width = int(widths[rows].max())
            inside = np.arange(width) < samples.lengths[rows, None]
            # The padding may hold anything; token 0 is in every vocabulary.
            block = np.zeros(inside.shape, np.int64)
            block[inside] = samples.tokens[rows][:, :width][inside[:, : samples.tokens.shape[1]]]
            tokens = torch.from_numpy(block).to(self.device)
            yield rows, tokens, stage(tokens)
            self._progress(name, int(inside.sum()))

    def _reference(
        self, stage: Stage, samples: Samples, shape: tuple[int, int], temperature: float
    ) -> NDArray[np.float32]:
        result = np.zeros(shape, np.float32)
        for rows, tokens, logits in self._batches("reference", stage, samples):
            for b, row in enumerate(rows):
                p, r = int(samples.prompts[row]), int(samples.responses[row])
                logprobs = token_logprobs(logits[b, p - 1 : p + r - 1], tokens[b, p : p + r], temperature)
                result[row, :r] = logprobs.cpu().numpy()
        return result

    def _critic(self, stage: Stage, samples: Samples, shape: tuple[int, int]) -> NDArray[np.float32]:
        result = np.zeros(shape, np.float32)
        for rows, _, values in self._batches("critic", stage, samples):
            block = values.float().cpu().numpy()
            for b, row in enumerate(rows):
                p, r = int(samples.prompts[row]), int(samples.responses[row])
                result[row, :r] = block[b, p - 1 : p + r - 1]
        return result

    def _reward(self, stage: Stage, samples: Samples) -> NDArray[np.float32]:
        result = np.zeros(len(samples.tokens), np.float32)
        for rows, _, values in self._batches("reward", stage, samples):
            last = torch.from_numpy(samples.lengths[rows] - 1).to(self.device)
            result[rows] = values.float().gather(1, last[:, None]).squeeze(1).cpu().numpy()
        return result

    # ------------------------------------------------------------ the critic's weights

    def stage_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy a version's tensors aside. Raises NotReady without a critic, ValueError unless they are
        exactly the critic's. Reads the critic's structure only, so that scoring may go on in another
        thread."""
        if "critic" not in self._stages:
            raise NotReady("model critic is not loaded; POST /v1/load first")
        expected = {name: p.shape for name, p in self._stages["critic"].named_parameters()}
        staged: dict[str, Tensor] = {}
        device = self.device if self.host is None else torch.device("cpu")
        for name, tensor in tensors:
            if name not in expected or tensor.shape != expected[name]:
                known = tuple(expected[name]) if name in expected else "no such tensor"
                raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} came; the critic has {known}")
            # Copied: the receiver's buffer is written again.
            staged[name] = torch.empty_like(tensor, dtype=self.dtype, device=device).copy_(tensor)
        missing = sorted(set(expected) - set(staged))
        if missing:
            raise ValueError(f"{len(missing)} of the critic's tensors did not come, first {missing[0]}")
        return staged

    def apply_weights(self, staged: Mapping[str, Tensor], version: int) -> None:
        """Make a complete staged version the critic's. Raises NotReady if the critic was unloaded or replaced
        by one of another shape meanwhile."""
        parameters = dict(self._stages["critic"].named_parameters()) if "critic" in self._stages else {}
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
