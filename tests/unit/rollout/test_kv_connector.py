"""Both halves of the KV connector, between two workers in one process: real caches and sockets, a scheduler in name."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.protocol.messages import HOLD, PULL, KVHold
from dovetail.rollout.kv import kv_config as config
from helpers.lazy import Lazy

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
connector = Lazy("dovetail.rollout.kv.connector")
vllm_request = Lazy("vllm.v1.request")
weights_vllm = Lazy("dovetail.rollout.weights_vllm")

BLOCK, BLOCKS, VERSION = 16, 10, 3


def request(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "request_id": "r",
        "num_prompt_tokens": 40,
        "num_computed_tokens": 50,
        "status": "FINISHED_ABORTED",
        "kv_transfer_params": {HOLD: {"key": "k", "weights": VERSION}},
    }
    fields |= changes
    fields["status"] = vllm_request.RequestStatus[fields["status"]]
    return SimpleNamespace(**fields)


def allocated(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def pulling(ports: list[int], **changes: Any) -> Any:
    params = {"key": "k", "host": "127.0.0.1", "ports": ports, "weights": VERSION}
    return request(num_computed_tokens=0, kv_transfer_params={PULL: params | changes})


# ---------------------------------------------------------------- the scheduler's half


def test_an_aborted_request_that_asked_for_it_keeps_its_blocks_for_one_step() -> None:
    half = connector.SchedulerHalf(BLOCK)
    assert half.finished(request(), [4, 5, 6, 7])
    (export,) = half.take().exports
    assert (export.hold.key, export.block_ids, export.tokens) == ("k", [4, 5, 6, 7], 50)
    assert half.take().exports == []


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "FINISHED_STOPPED"},
        {"status": "FINISHED_LENGTH_CAPPED"},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {HOLD: {"key": "k"}}},
        {"kv_transfer_params": {HOLD: "nonsense"}},
        {"kv_transfer_params": {HOLD: {"key": "k", "weights": VERSION, "min_tokens": 51}}},
        {"num_computed_tokens": 39},
        {"num_computed_tokens": 0},
    ],
    ids=["stopped", "length", "not asked", "no version", "nonsense", "too short", "in prefill", "preempted"],
)
def test_other_requests_let_go_of_their_blocks_at_once(changes: dict[str, Any]) -> None:
    half = connector.SchedulerHalf(BLOCK)
    ended = request(**changes)
    assert not half.finished(ended, [4, 5, 6, 7])
    metadata = half.take()
    assert metadata.exports == []
    # Also where the last token was made in the moment of the abort: somebody may be about to ask.
    assert metadata.refused == ([] if connector.asked(ended, HOLD, KVHold) is None else ["k"])


def test_all_tokens_but_the_last_are_asked_for_once() -> None:
    half, asking = connector.SchedulerHalf(BLOCK), pulling([1])
    assert half.matched(asking, 0) == (39, True)
    assert half.matched(asking, 16) == (23, True), "asking changes nothing"
    half.allocated(asking, allocated(2, 8, 9), 23)
    (load,) = half.take().loads
    assert (load.first, load.block_ids, load.tokens) == (1, [8, 9], 39)
    half.allocated(asking, allocated(2, 8, 9), 0)
    assert half.take().loads == []
    assert half.matched(asking, 0) == (0, False), "after a failure, or a preemption, it is computed"


@pytest.mark.parametrize("params", [None, {PULL: None}, {PULL: {"key": "k"}}, {PULL: 7}])
def test_parameters_that_make_no_sense_are_no_error(params: Any) -> None:
    assert connector.SchedulerHalf(BLOCK).matched(request(kv_transfer_params=params), 0) == (0, False)


def test_a_request_aborted_while_its_blocks_are_coming_is_not_held() -> None:
    half = connector.SchedulerHalf(BLOCK)
    both = {**pulling([1]).kv_transfer_params, **request().kv_transfer_params}
    asking = request(kv_transfer_params=both, num_computed_tokens=39)
    half.allocated(asking, allocated(1, 2, 3), 39)
    half.take()
    assert not half.finished(asking, [1, 2, 3]), "it counts as computed what has not come yet"
    metadata = half.take()
    assert (metadata.exports, metadata.cancels, metadata.refused) == ([], ["r"], ["k"])


# ---------------------------------------------------------------- two workers


def new_worker(caches: dict[str, Any]) -> tuple[config.KVSetup, Any]:
    setup = config.prepare("127.0.0.1", True, 1, "float32 x 1", 0)
    extra = json.loads(setup.arguments[1])["kv_connector_extra_config"]
    vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    worker = connector.WorkerHalf(vllm_config, SimpleNamespace(num_blocks=BLOCKS))
    worker.register(caches)
    return setup, worker


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, dict[str, torch.Tensor], list[int]]]]:
    """Source and destination, with their caches and ports."""
    monkeypatch.setenv("DOVETAIL_TOKEN", "job-token")
    monkeypatch.setattr("dovetail.rollout.kv.connector.tensor_parallel_rank", lambda: 0)
    monkeypatch.setattr(weights_vllm.LOADED, "version", VERSION)
    monkeypatch.setattr(config, "PULL_SECONDS", 30.0)
    monkeypatch.setattr(config, "WAIT_SECONDS", 0.0)
    made, setups = [], []
    for _ in range(2):
        # CPUs: blocks first; a GPU back end: keys and values first.
        caches = {"layer.0": torch.randn(BLOCKS, 2, BLOCK, 8), "layer.1": torch.randn(2, BLOCKS, BLOCK, 4)}
        setup, worker = new_worker(caches)
        made.append((worker, caches, setup.ability.ports))
        setups.append(setup)
    yield made
    for worker, _, _ in made:
        worker.close()
    for setup in setups:
        setup.reserved[0].close()


def export(worker: Any, block_ids: list[int], **changes: Any) -> None:
    half = connector.SchedulerHalf(BLOCK)
    assert half.finished(request(**changes), block_ids)
    for each in half.take().exports:
        worker.export(each)


def load(worker: Any, asking: Any, block_ids: list[int], computed: int = 0) -> Any:
    half = connector.SchedulerHalf(BLOCK)
    tokens, _ = half.matched(asking, computed)
    half.allocated(asking, allocated(*block_ids), tokens)
    for each in half.take().loads:
        worker.start(each)
    deadline = time.monotonic() + 60
    while not (results := worker.results()).finished_recving:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return results


def test_blocks_move_from_cache_to_cache(workers: Any) -> None:
    (source, theirs, ports), (target, ours, _) = workers
    before = {name: cache.clone() for name, cache in ours.items()}
    export(source, [4, 5, 6, 7])
    assert source.results().finished_sending == {"r"}, "its blocks are free again"
    theirs["layer.0"].zero_().add_(1)  # and may be written at once
    results = load(target, pulling(ports), [9, 2, 0], computed=16)
    assert results.failed_recving == set()
    # 39 tokens are three blocks, the first of which was there already.
    assert torch.equal(ours["layer.1"][:, [2, 0]], theirs["layer.1"][:, [5, 6]])
    assert not torch.equal(ours["layer.0"][[2, 0]], before["layer.0"][[2, 0]])
    others = [1, 3, 4, 5, 6, 7, 8, 9]
    assert torch.equal(ours["layer.0"][others], before["layer.0"][others])
    assert torch.equal(ours["layer.1"][:, others], before["layer.1"][:, others])


def test_older_weights_are_neither_kept_nor_taken(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (source, _, ports), (target, ours, _) = workers
    before = {name: cache.clone() for name, cache in ours.items()}
    export(source, [4, 5, 6, 7], kv_transfer_params={HOLD: {"key": "k", "weights": VERSION - 1}})
    assert source.results().finished_sending == {"r"}
    assert load(target, pulling(ports), [1, 2, 3]).failed_recving == {"r"}

    export(source, [4, 5, 6, 7])
    assert load(target, pulling(ports, weights=VERSION + 1), [1, 2, 3]).failed_recving == {"r"}

    # The destination took new weights while the blocks were on their way.
    real = connector.pull

    def slow(*args: Any) -> Any:
        layers = real(*args)
        monkeypatch.setattr(weights_vllm.LOADED, "version", VERSION + 1)
        return layers

    monkeypatch.setattr("dovetail.rollout.kv.connector.pull", slow)
    assert load(target, pulling(ports), [1, 2, 3]).failed_recving == {"r"}
    assert all(torch.equal(ours[name], before[name]) for name in ours)


@pytest.mark.slow
def test_a_missing_key_or_a_dead_source_is_a_failed_load(workers: Any) -> None:
    (source, _, ports), (target, _, _) = workers
    assert load(target, pulling(ports, key="never seen"), [1, 2, 3]).failed_recving == {"r"}
    assert load(target, pulling([]), [1, 2, 3]).failed_recving == {"r"}
    source.close()
    assert load(target, pulling(ports), [1, 2, 3]).failed_recving == {"r"}


def test_a_cancelled_load_is_over_at_once_and_writes_nothing(workers: Any) -> None:
    _, (target, ours, _) = workers
    before = {name: cache.clone() for name, cache in ours.items()}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        half, asking = connector.SchedulerHalf(BLOCK), pulling([silent.getsockname()[1]])
        half.allocated(asking, allocated(1, 2, 3), half.matched(asking, 0)[0])
        target.start(half.take().loads[0])
        connection, _ = silent.accept()
        with connection:
            assert target.results().finished_recving == set()
            target.cancel("r")
            assert target.results().finished_recving == {"r"}
    target.cancel("r")
    assert target.results().finished_recving == set(), "reported once"
    assert all(torch.equal(ours[name], before[name]) for name in ours)


@pytest.mark.parametrize("when", ["before it is asked for", "while it is awaited"])
def test_what_is_not_kept_is_not_waited_for(workers: Any, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    (source, _, ports), (target, _, _) = workers
    monkeypatch.setattr(source._server._server, "wait_seconds", 600.0)
    if when == "before it is asked for":
        source.refuse(["k"])
    else:
        timer = threading.Timer(0.1, source.refuse, (["k"],))
        timer.start()
    assert load(target, pulling(ports), [1, 2, 3]).failed_recving == {"r"}


def test_a_full_host_memory_keeps_no_more(workers: Any) -> None:
    (source, _, ports), (target, _, _) = workers
    source._server._server.wait_seconds = 600.0
    source._held._capacity = 10
    export(source, [4, 5, 6, 7])
    assert source.results().finished_sending == {"r"}, "blocks are never kept waiting"
    assert load(target, pulling(ports), [1, 2, 3]).failed_recving == {"r"}


def test_a_worker_without_a_token_neither_serves_nor_fetches(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, _, ports), _ = workers
    monkeypatch.setenv("DOVETAIL_TOKEN", "")
    setup, worker = new_worker({"layer.0": torch.randn(BLOCKS, 2, BLOCK, 8)})
    export(worker, [1, 2, 3, 4])
    assert worker.results().finished_sending == {"r"}
    assert load(worker, pulling(ports), [1, 2, 3]).failed_recving == {"r"}
    worker.close()
    setup.reserved[0].close()


@pytest.mark.parametrize("cache", [torch.zeros(3, 4, 10), [torch.zeros(BLOCKS, 4)]], ids=["shape", "list"])
def test_with_a_cache_that_is_not_made_of_blocks_all_is_computed(workers: Any, cache: Any) -> None:
    (source, _, ports), _ = workers
    export(source, [1, 2, 3, 4])
    setup, worker = new_worker({"layer.0": cache})
    export(worker, [1, 2, 3, 4])
    assert worker.results().finished_sending == {"r"}
    assert load(worker, pulling(ports), [1, 2, 3]).failed_recving == {"r"}
    worker.close()
    setup.reserved[0].close()


# ---------------------------------------------------------------- NIXL's scheduler half, with our settings


def nixl_scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a server on GPUs whose image has NIXL: vLLM's own code, as our arguments and environment make it."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

    monkeypatch.setattr(config, "choose_transport", lambda on_cpu: "nixl")
    setup = config.prepare("127.0.0.1", False, 1, "bfloat16 x 1", 100)
    for name, value in setup.environment.items():
        monkeypatch.setenv(name, value)
    chosen = KVTransferConfig(**json.loads(setup.arguments[1]))
    assert KVConnectorFactory.get_connector_class(chosen).__name__ in ("NixlConnector", "NixlPullConnector")
    parallel = {"tensor_parallel_size": 1, "decode_context_parallel_size": 1, "data_parallel_index": 0}
    server = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(block_size=BLOCK),
        kv_transfer_config=chosen,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        num_prefill_lookahead_tokens=0,
    )
    groups = SimpleNamespace(transfer_groups=[], kv_cache_groups=[], has_mamba_layers=False)
    return NixlPullConnectorScheduler(server, chosen.engine_id, groups)


def test_nixl_gives_the_blocks_of_one_more_token_to_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the coordinator asks of the old server (`nixl_leg`) and hands to the new one. Blocks do not travel here."""
    old = nixl_scheduler(monkeypatch)
    monkeypatch.setattr(old, "get_exchange_clipped_blocks", lambda blocks: blocks)
    leg = request(
        request_id="leg",
        num_computed_tokens=40,
        status="FINISHED_LENGTH_CAPPED",
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
    )
    kept, params = old.request_finished(leg, ([4, 5, 6],))
    assert kept, "the old server keeps them until they were read"
    new = nixl_scheduler(monkeypatch)
    assert params["remote_port"] != new.side_channel_port
    moved = request(num_computed_tokens=0, kv_transfer_params=dict(params), prompt_token_ids=list(range(40)))
    assert new.get_num_new_matched_tokens(moved, 16) == (24, True), "what the new server has itself is not asked for"
    blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([8, 9],), blocks=([],))
    monkeypatch.setattr(new, "get_exchange_clipped_blocks", lambda blocks: blocks)
    new.update_state_after_alloc(moved, blocks, 24)
    assert set(new._reqs_need_recv) == {"r"}
    assert params["remote_block_ids"] == ([4, 5, 6],)
    assert (params["remote_host"], params["remote_engine_id"]) == ("127.0.0.1", old.engine_id)
