"""Decides for each sample that changes servers whether its KV cache moves too, and tells both servers what to do.

A KV cache moves only between servers that both announce it (`Register.abilities["kv"]`) and have the same layout and
weights. If anything fails, the destination prefills the tokens, so no sample is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from pydantic import ValidationError

from dovetail.coordinator.samples.migration_costs import MeasuredCosts, Mechanism, MigrationCosts
from dovetail.coordinator.samples.migrations import Departure
from dovetail.coordinator.workers.fleet import Instance
from dovetail.protocol.messages import HOLD, HOLD_SECONDS, PULL, KVAbility, KVPull

BYTES_PER_SECOND = {"tcp": 1e9, "nixl": 20e9}
# KV cache blocks are fetched only within this time after the abort, because the server drops them soon after.
FRESH_SECONDS = HOLD_SECONDS - 10.0
LEG_SECONDS = 10.0
GENERATE = "/inference/v1/generate"


class KVMigration:
    """The KV cache transfers of a job. `moves` has the number of samples that changed servers, by mechanism. `nbytes`
    is the number of bytes of KV cache that were requested."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._costs: dict[tuple[str, str], MeasuredCosts] = {}
        # What each instance announced last, and the same as a KVAbility.
        self._abilities: dict[str, tuple[Any, KVAbility | None]] = {}
        self.moves: Counter[Mechanism] = Counter()
        self.nbytes = 0

    async def prepare(
        self,
        session: aiohttp.ClientSession,
        body: dict[str, Any],
        target: Instance,
        departure: Departure | None,
        resumed: bool,
    ) -> Callable[[], tuple[Mechanism, float] | None]:
        """Add to a request what `target` must know about moves. Returns a function to call when tokens arrive. If the
        sample is a `resumed` one, the first call returns the mechanism by which the sample came and the seconds that
        this took. Otherwise it returns None."""
        tokens = body["token_ids"]
        pull = await self._pull(session, departure, target, tokens) if resumed else {}
        if params := pull | self._hold(target, body["request_id"]):
            body["kv_transfer_params"] = params
        began: float | None = self._clock() if resumed else None

        def arrived() -> tuple[Mechanism, float] | None:
            nonlocal began
            if began is None:
                return None
            seconds, began = self._clock() - began, None
            mechanism = Mechanism.KV if pull else Mechanism.TOKENS
            self._moved(target, mechanism, len(tokens), seconds)
            return mechanism, seconds

        return arrived

    def left(self, source: Instance, request_id: str) -> Departure | None:
        """Where the KV cache is after `source` aborted a request that had generated tokens. `source` is the state of
        the instance when the request began."""
        if source.weight_version is None or self._ability(source) is None:
            return None
        return Departure(source, request_id, source.weight_version, self._clock())

    def _hold(self, instance: Instance, key: str) -> dict[str, Any]:
        """The kv_transfer_params that make a later move of a request possible."""
        kv = self._ability(instance)
        if kv is None or kv.transport != "tcp" or instance.weight_version is None:
            return {}
        least = self._measured(kv).costs.least_tokens()
        if least is None:
            return {}
        # As `KVHold` writes itself. It is made for each sample.
        return {HOLD: {"key": key, "weights": instance.weight_version, "min_tokens": least}}

    async def _pull(
        self, session: aiohttp.ClientSession, departure: Departure | None, target: Instance, tokens: Sequence[int]
    ) -> dict[str, Any]:
        """The kv_transfer_params for the resubmission of `tokens` (prompt and response so far) to `target`. They are
        empty if the tokens are to be prefilled."""
        if departure is None or self._clock() - departure.time > FRESH_SECONDS:
            return {}
        there, here = self._ability(departure.source), self._ability(target)
        if (
            there is None
            or here is None
            or (there.transport, there.layout) != (here.transport, here.layout)
            or departure.weights != target.weight_version
            or departure.source.name == target.name
            or self._measured(here).costs.choose(len(tokens)) is Mechanism.TOKENS
        ):
            return {}
        if there.transport == "tcp":
            asked = KVPull(key=departure.key, host=there.host, ports=there.ports, weights=departure.weights)
            return {PULL: asked.model_dump()}
        return await nixl_leg(session, departure.source.url, tokens)

    def _moved(self, target: Instance, mechanism: Mechanism, tokens: int, seconds: float) -> None:
        self.moves[mechanism] += 1
        kv = self._ability(target)
        if kv is not None:
            measured = self._measured(kv)
            measured.measured(mechanism, tokens, seconds)
            if mechanism is Mechanism.KV:
                self.nbytes += measured.costs.nbytes(tokens)

    def _ability(self, instance: Instance) -> KVAbility | None:
        """The KV cache transfer that an instance announces. None if it announces nothing, or nothing that this
        coordinator understands."""
        announced = instance.abilities.get("kv")
        known = self._abilities.get(instance.name)
        if known is None or known[0] != announced:
            try:
                found = None if announced is None else KVAbility.model_validate(announced)
            except ValidationError:
                found = None
            known = self._abilities[instance.name] = announced, found
        return known[1]

    def _measured(self, kv: KVAbility) -> MeasuredCosts:
        """The measured costs, shared by servers of one kind."""
        kind = kv.transport, kv.layout
        if kind not in self._costs:
            speed = BYTES_PER_SECOND[kv.transport]
            self._costs[kind] = MeasuredCosts(MigrationCosts(kv.token_bytes, kv.block_tokens, bytes_per_second=speed))
        return self._costs[kind]


async def nixl_leg(session: aiohttp.ClientSession, url: str, tokens: Sequence[int]) -> dict[str, Any]:
    """The parameters of a NIXL transfer. NIXL sends only the KV cache of requests that ended by their length. So the
    old server generates one more token. Its prefix cache still has all but the last block. Its answer has the
    parameters. The result is empty if that fails."""
    body = {
        "model": "actor",
        "token_ids": list(tokens),
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    try:
        async with session.post(
            url + GENERATE, json=body, timeout=aiohttp.ClientTimeout(total=LEG_SECONDS)
        ) as response:
            if response.status != 200:
                return {}
            params = (await response.json()).get("kv_transfer_params")
            return dict(params) if isinstance(params, dict) and params.get("do_remote_prefill") else {}
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return {}
