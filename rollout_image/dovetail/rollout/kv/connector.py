"""A KV connector of vLLM. An aborted request leaves its KV cache to the server that continues it.

At the source, a request has `dovetail_hold` in its kv_transfer_params and is aborted after its prefill. Then it keeps
its blocks for one step. In this step each worker copies them to host memory, and from then on serves them
(`dovetail.rollout.kv.kv_wire`).

At the destination, a request with `dovetail_pull` waits until a thread has fetched the blocks of all its tokens but the
last. Other requests are decoded meanwhile. The blocks are copied into the cache between two steps, and one decode step
computes the last token. If anything goes wrong, the request is prefilled as if it had not asked.

Blocks carry the weight version that computed them. A worker keeps or takes blocks only if it holds this version. An
update begins by forgetting the version, so no block outlives it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ValidationError
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger

from dovetail.protocol.messages import HOLD, PULL, KVHold, KVPull
from dovetail.protocol.process.env import TOKEN
from dovetail.rollout.compat import tensor_parallel_rank, was_aborted
from dovetail.rollout.kv.held import Held, HeldBlocks
from dovetail.rollout.kv.kv_wire import HeldServer, PullError, pull
from dovetail.rollout.weights_vllm import LOADED

# vLLM configures loggers below this name only.
logger = init_logger("vllm.dovetail.kv")

# So many requests fetch blocks at a time. Each needs host memory for its blocks.
PULLERS = 4


@dataclass
class BlockExport:
    """The blocks of a finished request, in which `tokens` tokens are computed."""

    request_id: str
    hold: KVHold
    block_ids: list[int]
    tokens: int


@dataclass
class BlockLoad:
    """The blocks [first, last) of a waiting request, which are fetched from another server. `tokens` is the number of
    tokens that are fetched, counted from the request's start."""

    request_id: str
    pull: KVPull
    block_ids: list[int]
    first: int
    tokens: int


@dataclass
class Metadata(KVConnectorMetadata):
    """`cancels`: requests that were aborted while their blocks were coming. `refused`: keys whose blocks are not kept,
    though the requests asked for it."""

    exports: list[BlockExport] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)


class DovetailConnector(KVConnectorBase_V1):
    """The connector in both roles. vLLM makes one per process and role. There is one KV cache group, and one port per
    tensor-parallel rank."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._half: SchedulerHalf | WorkerHalf = (
            SchedulerHalf(vllm_config.cache_config.block_size)
            if role is KVConnectorRole.SCHEDULER
            else WorkerHalf(vllm_config, kv_cache_config)
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # lost blocks are recomputed

    @property
    def _scheduling(self) -> SchedulerHalf:
        assert isinstance(self._half, SchedulerHalf)
        return self._half

    @property
    def _working(self) -> WorkerHalf:
        assert isinstance(self._half, WorkerHalf)
        return self._half

    # ------------------------------------------------------------ scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduling.take()

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduling.loading -= set(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, block_ids), None

    # ------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._working.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._metadata()
        self._working.refuse(metadata.refused)
        for load in metadata.loads:
            self._working.start(load)
        for request_id in metadata.cancels:
            self._working.cancel(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for export in self._metadata().exports:
            self._working.export(export)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._working.results()

    def shutdown(self) -> None:
        if isinstance(self._half, WorkerHalf):
            self._half.close()

    def _metadata(self) -> Metadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        return metadata


def asked(request: Any, key: str, kind: Any) -> Any:
    """The request's parameters of one kind, or None if there are none or they are not valid."""
    given = (request.kv_transfer_params or {}).get(key)
    if given is None:
        return None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        logger.warning("%s of request %s is ignored: %s", key, request.request_id, error)
        return None


class SchedulerHalf:
    """The scheduler's half. It decides which blocks to keep and which to fetch."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._next = Metadata()
        self._tried: set[str] = set()
        self.loading: set[str] = set()

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """The number of tokens after `computed` (whole blocks) that could come from another server, and whether they
        come while other requests run. These are all tokens except the last one. A request may ask only once."""
        if request.request_id in self._tried or asked(request, PULL, KVPull) is None:
            return 0, False
        tokens = request.num_prompt_tokens - 1 - computed
        return (tokens, True) if tokens > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        if external == 0:
            return
        tokens = request.num_prompt_tokens - 1
        first, last = (tokens - external) // self._block_size, -(-tokens // self._block_size)
        (ids,) = blocks.get_block_ids()
        self._tried.add(request.request_id)
        self.loading.add(request.request_id)
        params = asked(request, PULL, KVPull)
        self._next.loads.append(BlockLoad(request.request_id, params, list(ids[first:last]), first, tokens))

    def take(self) -> Metadata:
        """The work of the workers in the step that is being scheduled."""
        metadata, self._next = self._next, Metadata()
        return metadata

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """Whether the blocks are kept until the workers have copied them."""
        self._tried.discard(request.request_id)
        hold = asked(request, HOLD, KVHold)
        tokens, least = request.num_computed_tokens, request.num_prompt_tokens
        loading = request.request_id in self.loading
        if loading:
            # Its number of computed tokens includes tokens that have not come yet. vLLM frees its blocks once the
            # workers report.
            self._next.cancels.append(request.request_id)
        if hold is None:
            return False
        aborted = was_aborted(request)
        if loading or not aborted or tokens < max(least, hold.min_tokens) or not block_ids:
            # A request that was complete is refused too, because a client that aborts it at this moment does not know
            # that.
            self._next.refused.append(hold.key)
            return False
        self._next.exports.append(BlockExport(request.request_id, hold, list(block_ids), tokens))
        return True


class WorkerHalf:
    """A worker's half. It has the copies out of the cache and into it, the server, and the threads that fetch."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._rank = tensor_parallel_rank()
        self._token = os.environ.get(TOKEN, "")
        self._extra = extra
        self._layout = ""
        self._pull_seconds = float(extra["pull_seconds"])
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._caches: list[torch.Tensor] = []
        self._block_bytes: list[int] = []
        self._held = HeldBlocks(int(extra["held_bytes"]), float(extra["hold_seconds"]), lambda: LOADED.version)
        self._server: HeldServer | None = None
        self._pool = ThreadPoolExecutor(PULLERS, thread_name_prefix="dovetail-kv-pull")
        self._fetching: dict[str, tuple[BlockLoad, Future[list[torch.Tensor]], float]] = {}
        self._copied: set[str] = set()
        self._cancelled: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Begin to serve. If the caches are not made of blocks, nothing is kept and every request fails."""
        caches: dict[int, torch.Tensor] = {}  # by address, because layers may share a cache
        for name, cache in kv_caches.items():
            shape = tuple(getattr(cache, "shape", ()))
            blocks = [d for d, size in enumerate(shape[:2]) if size == self._num_blocks]
            if not blocks:
                logger.warning("the KV cache of %s, shape %s, is not %d blocks", name, shape, self._num_blocks)
                return
            caches.setdefault(cache.data_ptr(), cache.movedim(blocks[0], 0))
        self._caches = list(caches.values())
        self._block_bytes = [c[0].numel() * c.element_size() for c in self._caches]
        shapes = sorted({f"{c.dtype}{list(c.shape[1:])}" for c in self._caches})
        self._layout = f"{self._extra['layout']} {len(self._caches)} x {' '.join(shapes)}"
        self._serve()

    def _serve(self) -> None:
        if not self._token:
            logger.warning("%s is empty: the KV cache is neither served nor fetched", TOKEN)
            return
        host, port, wait = (
            self._extra["host"],
            int(self._extra["ports"][self._rank]),
            float(self._extra["wait_seconds"]),
        )
        try:
            self._server = HeldServer((host, port), self._held, self._token, self._layout, self._pull_seconds, wait)
        except OSError as error:
            logger.warning("the KV cache cannot be served on port %d: %s", port, error)

    # ------------------------------------------------------------ out

    def export(self, export: BlockExport) -> None:
        """Copy blocks to host memory and serve them."""
        self._copied.add(export.request_id)
        began, size = time.monotonic(), len(export.block_ids) * sum(self._block_bytes)
        if self._server is None or not self._held.may_hold(export.hold.weights, size):
            logger.info("%s is not kept: no room, or not computed with the weights of now", export.hold.key)
            self.refuse([export.hold.key])
            return
        layers = []
        for cache, nbytes in zip(self._caches, self._block_bytes, strict=True):
            ids = torch.tensor(export.block_ids, device=cache.device)
            chosen = cache.index_select(0, ids).contiguous().cpu()
            layers.append(chosen.view(len(ids), -1).view(torch.uint8).view(len(ids), nbytes))
        self._held.put(export.hold.key, Held(export.hold.weights, export.tokens, tuple(layers)))
        logger.info(
            "%s: %d tokens, %d bytes kept in %.1f ms",
            *(export.hold.key, export.tokens, size, 1e3 * (time.monotonic() - began)),
        )

    def refuse(self, keys: Sequence[str]) -> None:
        """Refuse these keys, so that nobody waits for them."""
        for key in keys:
            self._held.refuse(key)

    # ------------------------------------------------------------ in

    def start(self, load: BlockLoad) -> None:
        future = self._pool.submit(self._fetch, load, time.monotonic() + self._pull_seconds)
        self._fetching[load.request_id] = (load, future, time.monotonic())

    def cancel(self, request_id: str) -> None:
        """Stop waiting. Blocks that still arrive are dropped."""
        found = self._fetching.pop(request_id, None)
        if found is not None:
            found[1].cancel()
            self._cancelled.add(request_id)

    def _fetch(self, load: BlockLoad, end: float) -> list[torch.Tensor]:
        if self._server is None or len(load.pull.ports) <= self._rank:
            raise PullError("this worker takes part in no transfers" if self._server is None else "no port is given")
        left = end - time.monotonic()
        if left <= 0:
            raise PullError(f"others took all of the {self._pull_seconds:g} s")
        blocks = (load.first, load.first + len(load.block_ids))
        address = (load.pull.host, load.pull.ports[self._rank])
        weights = load.pull.weights
        return pull(
            address, self._token, load.pull.key, blocks, load.tokens, weights, self._layout, self._block_bytes, left
        )

    def _install(self, load: BlockLoad, layers: Sequence[torch.Tensor]) -> None:
        if LOADED.version != load.pull.weights:
            raise PullError(f"it is of weights {load.pull.weights}, this worker holds {LOADED.version}")
        for cache, layer in zip(self._caches, layers, strict=True):
            ids = torch.tensor(load.block_ids, device=cache.device)
            cache.index_copy_(0, ids, layer.view(cache.dtype).view(len(ids), *cache.shape[1:]).to(cache.device))

    def results(self) -> KVConnectorTransferResults:
        """The transfers that ended since the last step. Blocks that have arrived are in the cache when this returns."""
        results = KVConnectorTransferResults(finished_sending=self._copied, finished_recving=self._cancelled)
        self._copied, self._cancelled = set(), set()
        for request_id in [r for r, (_, future, _) in self._fetching.items() if future.done()]:
            load, future, began = self._fetching.pop(request_id)
            results.finished_recving.add(request_id)
            try:
                self._install(load, future.result())
                size = len(load.block_ids) * sum(self._block_bytes)
                logger.info(
                    "%s: %d tokens, %d bytes taken over from %s in %.1f ms",
                    *(load.pull.key, load.tokens, size, load.pull.host, 1e3 * (time.monotonic() - began)),
                )
            except PullError as error:
                results.failed_recving.add(request_id)
                logger.warning(
                    "%s is computed again, its KV cache did not come from %s: %s",
                    *(load.pull.key, load.pull.host, error),
                )
        return results

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(OSError):
                server.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._held.clear()
