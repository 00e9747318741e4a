"""The batches that trainers fetch by name: `GET /v1/batches/{key}`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from dovetail.coordinator.data.prepare import Prepared
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.reference_logprobs import ReferenceLogprobs
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import Stage
from dovetail.protocol.wire import Arrays, pack

# At most so many bytes of packed batches are kept for ranks that ask later. The newest batch is always kept.
KEPT_BYTES = 256 * 2**20


class NotPrepared(RuntimeError):
    """The data is not prepared yet."""


class Batches:
    """The batches by their names, which are `sft/<step>`, `reward/<step>`, `dpo/<step>` and `ppo/<iteration>`. Those
    for evaluations are `sft-eval/<i>`, `reward-eval/<i>`, `dpo-eval/<i>` and `demonstrations/<i>`. The arrays are those
    of docs/architecture.md, "Batches". `references` adds the reference's log-probabilities to DPO's batches."""

    def __init__(self, prepared: Prepared | None, files: ExperienceFiles, store: Store) -> None:
        """`prepared` is None while the data is being prepared."""
        self._prepared, self._files, self._store = prepared, files, store
        self.references = ReferenceLogprobs(store)
        self._held_out: dict[str, Sequence[Arrays]] = {}
        self._packed: OrderedDict[str, asyncio.Task[bytes]] = OrderedDict()

    async def fetch(self, key: str) -> bytes | Path:
        """The packed arrays of a batch. For PPO this is the file that holds them. All ranks ask for the same batch at
        about the same time, so it is packed once, in a thread. Raises LookupError for an unknown key, ValueError for a
        damaged batch, and NotPrepared while the data is being prepared."""
        stage, _, number = key.partition("/")
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise KeyError("a batch's name must be a stage and a number, as sft/1")
        if stage == Stage.PPO:
            digest = self._store.get(f"ppo/{int(number)}/batch")
            return await asyncio.to_thread(self._files.checked, int(number), digest)
        # A batch of DPO is asked for again when its reference is known.
        name = f"{key} {len(self.references)}" if stage.startswith(Stage.DPO) else key
        if name not in self._packed:
            self._packed[name] = asyncio.create_task(asyncio.to_thread(self._pack, key))
        task = self._packed[name]
        try:
            found = await asyncio.shield(task)
        except BaseException:
            if task.done() and (task.cancelled() or task.exception() is not None):
                self._packed.pop(name, None)  # the next request tries again
            raise
        while self.buffered > KEPT_BYTES and len(self._packed) > 1:
            self._packed.popitem(last=False)
        return found

    @property
    def buffered(self) -> int:
        """The bytes of the packed batches in memory."""
        done = (task for task in self._packed.values() if task.done() and task.exception() is None)
        return sum(len(task.result()) for task in done)

    def _pack(self, key: str) -> bytes:
        arrays = self.arrays(key)
        return pack(self.references.added(arrays) if key.startswith(Stage.DPO) else arrays)

    def arrays(self, key: str) -> Arrays:
        """A batch of a stage other than PPO. Raises LookupError and NotPrepared."""
        stage, _, number = key.partition("/")
        if self._prepared is None:
            raise NotPrepared("the coordinator is still preparing its data")
        makers: dict[str, Callable[[int], Arrays]] = {
            "sft": self._prepared.sft_batch,
            "reward": self._prepared.reward_batch,
            "dpo": self._prepared.dpo_batch,
            "sft-eval": lambda i: self.held_out(Stage.SFT)[i],
            "reward-eval": lambda i: self.held_out(Stage.REWARD)[i],
            "dpo-eval": lambda i: self.held_out(Stage.DPO)[i],
            "demonstrations": lambda i: self.demonstrations()[i],
        }
        if stage not in makers:
            raise KeyError(key)
        return makers[stage](int(number))

    def held_out(self, stage: Stage) -> Sequence[Arrays]:
        """The batches on which the stage is evaluated."""
        assert self._prepared is not None
        makers = {
            Stage.SFT: self._prepared.sft_eval_batches,
            Stage.REWARD: self._prepared.reward_eval_batches,
            Stage.DPO: self._prepared.dpo_eval_batches,
        }
        if stage not in self._held_out:
            self._held_out[stage] = makers[stage]()
        return self._held_out[stage]

    def equal_pairs(self) -> str:
        """A warning about pairs from which training learns nothing. Empty if there are none."""
        assert self._prepared is not None
        return self._prepared.equal_pairs()

    def demonstrations(self) -> Sequence[Arrays]:
        """The batches by which a new reward model is centred."""
        assert self._prepared is not None
        if "demonstrations" not in self._held_out:
            self._held_out["demonstrations"] = self._prepared.scored_demonstrations()
        return self._held_out["demonstrations"]
