"""Generation over a fleet of (fake) vLLM servers that die, stall, abort and come late: every sample is answered once,
as an undisturbed server would have answered it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dovetail.coordinator.reporting.telemetry import CoordinatorMetrics
from dovetail.coordinator.samples.in_flight import GenerationError, GenerationSettings
from dovetail.coordinator.store.samples import State
from dovetail.protocol.http.client_session import resent
from helpers.fake_vllm import FakeVllm
from helpers.generation_job import MAX_TOKENS, Job, play, until


def test_all_samples_are_generated_on_all_servers(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        a, b = await job.server("r0"), await job.server("r1")
        result = await job.generate()
        job.check()
        job.reported_once()
        assert len(a.requests) == len(b.requests) == 8
        total = sum(len(s.tokens) for s in job.finished)
        assert (result.samples, result.tokens, result.retries) == (16, total, 0)
        assert job.progress[-1] == (16, 16, total)
        assert [(s.process, s.args["samples"], s.iteration) for s in result.spans] == [("r0", 8, 1), ("r1", 8, 1)]
        again = await job.generate()
        assert (again.samples, len(a.requests)) == (0, 8)

    play(tmp_path, scenario)


def test_no_server_gets_more_than_its_most(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        server = await job.server("r0")
        await job.generate()
        job.check()
        assert server.most_running <= 3

    play(tmp_path, scenario, generation={"maxConcurrent": 3})


@pytest.mark.parametrize("after", [1, 30, 90])
def test_a_dying_servers_samples_go_on_elsewhere_from_their_tokens(tmp_path: Path, after: int) -> None:
    async def scenario(job: Job) -> None:
        a, b = await job.server("r0"), await job.server("r1")
        a.die_after = after
        result = await job.generate()
        job.check()
        job.reported_once()
        assert result.retries >= 1
        prompts = {s.seed: len(s.prompt_tokens) for s in job.finished}
        continued = [
            r for r in b.requests if len(r["token_ids"]) > prompts[r["sampling_params"]["extra_args"]["dt_seed"]]
        ]
        # The bill of the run says what was computed twice.
        again = {span.process: span.args.get("prefilled_again", 0) for span in result.spans}
        assert again == {"r0": 0, "r1": sum(len(r["token_ids"]) for r in continued)}
        if after == 90:
            assert continued, "a continuation starts from prompt + tokens so far"
            for r in continued:
                kept = len(r["token_ids"]) - prompts[r["sampling_params"]["extra_args"]["dt_seed"]]
                assert r["sampling_params"]["max_tokens"] == MAX_TOKENS - kept

    play(tmp_path, scenario)


def test_a_kept_connection_that_the_server_closes_is_no_failure(tmp_path: Path) -> None:
    """A connection may end while nothing is drawn, perhaps just when the next request comes. No server is suspect for
    that, and no sample moves."""

    async def scenario(job: Job) -> None:
        server = await job.server("r0")
        server.faults["closed"], before = 5, resent()
        result = await job.generate()
        assert resent() == before + 5
        registry = CollectorRegistry()
        CoordinatorMetrics(registry)
        assert f"dovetail_requests_resent_total {float(resent())}" in generate_latest(registry).decode()
        assert server.faults["closed"] == 0
        assert (result.retries, result.migrations) == (0, [])
        assert not [e for e, _ in job.events if e in ("sample.retried", "sample.moved", "instance.suspect")]
        job.check()
        job.reported_once()

    play(tmp_path, scenario, generation={"maxConcurrent": 1})


@pytest.mark.parametrize("fault", ["unavailable", "empty abort", "error event"])
def test_passing_faults_of_a_sample_are_retried(tmp_path: Path, fault: str) -> None:
    async def scenario(job: Job) -> None:
        server = await job.server("r0")
        server.faults[fault] = 5
        result = await job.generate()
        assert (result.retries, result.migrations) == (5, []), "there is one server"
        assert not [fields for event, fields in job.events if event == "sample.moved"]
        job.check()
        job.reported_once()

    play(tmp_path, scenario)


@pytest.mark.parametrize(("fault", "said"), [("garbage", "a frame of its stream cannot be read"), ("broken", "ended")])
def test_a_broken_stream_of_samples_is_opened_again(tmp_path: Path, fault: str, said: str) -> None:
    async def scenario(job: Job) -> None:
        server = await job.server("r0")
        server.faults[fault] = 2
        result = await job.generate()
        assert result.retries > 0
        assert {said in fields["reason"] for event, fields in job.events if event == "sample.retried"} == {True}
        assert not [fields for event, fields in job.events if event == "sample.moved"]
        job.check()
        job.reported_once()

    play(tmp_path, scenario)


def test_a_stalled_server_is_given_up(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        a = await job.server("r0")
        await job.server("r1")
        a.faults["stall"] = 8
        task = asyncio.create_task(job.generate())
        await until(lambda: len(job.finished) == 8)
        job.clock.passed += job.settings.stall + 1
        await task
        job.check()
        job.reported_once()
        reasons = [f["reason"] for e, f in job.events if e == "sample.retried"]
        assert len(reasons) == 8
        assert all(r.startswith("no token for") for r in reasons)

    play(tmp_path, scenario)


def test_a_request_that_no_server_will_take_fails_with_the_servers_words(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        (await job.server("r0")).faults["refuse"] = 1
        with pytest.raises(GenerationError, match=r"r0 refused sample 0 of prompt \d+ .*prompt is too long"):
            await job.generate()
        assert set(job.store.samples.counts(1)) <= {State.PENDING, State.GENERATED}

    play(tmp_path, scenario)


def test_a_sample_that_never_gets_a_token_fails_in_the_end(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        (await job.server("r0")).faults["unavailable"] = None
        with pytest.raises(GenerationError, match=r"got no token in 3 attempts; the last, on r0: .*no weights yet"):
            await job.generate()

    play(tmp_path, scenario, settings=GenerationSettings(flush=0.02, max_fruitless=3))


def test_without_servers_it_waits_and_then_says_for_what(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        with pytest.raises(GenerationError, match=r"no rollout could take the 16 remaining samples of iteration 1"):
            await job.generate()

    play(tmp_path, scenario, settings=GenerationSettings(flush=0.02, wait=0.2))


@pytest.mark.slow
def test_a_server_that_comes_late_gets_work(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        task = asyncio.create_task(job.generate())
        a = await job.server("r0", step=0.02)
        await until(lambda: a.tokens_sent > 30)
        b = await job.server("r1")
        await task
        job.check()
        job.reported_once()
        assert b.tokens_sent > 0

    play(tmp_path, scenario)


def test_a_server_that_dies_and_comes_back_works_again(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        a = await job.server("r0")
        a.die_after = 50
        task = asyncio.create_task(job.generate())
        await until(lambda: a._runner is None)
        again = FakeVllm("r0")
        again.incarnation = "2"
        await again.start()
        job.servers.append(again)
        again.join(job.fleet)
        await task
        job.check()
        job.reported_once()

    play(tmp_path, scenario)


def test_a_process_replaced_behind_open_connections_is_noticed(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        a = await job.server("r0")
        a.faults["stall"] = None  # its host is gone: connections stay open, nothing comes
        task = asyncio.create_task(job.generate())
        await until(lambda: len(a.running) == job.count)
        b = FakeVllm("r0")
        b.incarnation = "2"
        await b.start()
        job.servers.append(b)
        b.join(job.fleet)
        await task
        job.check()

    play(tmp_path, scenario, settings=GenerationSettings(flush=0.02, stall=1000))


@pytest.mark.parametrize("deaf", [False, True])
def test_draining_moves_samples_and_keeps_their_tokens(tmp_path: Path, deaf: bool) -> None:
    async def scenario(job: Job) -> None:
        a = await job.server("r0", step=0.005)
        await job.server("r1", step=0.005)
        if deaf:
            a.faults["deaf"] = None
        task = asyncio.create_task(job.generate())
        await until(lambda: a.tokens_sent > 20)
        job.fleet.retire("r0")
        assert not job.generator.left("r0")
        await until(lambda: job.generator.left("r0"))
        moved = [f for e, f in job.events if e == "sample.moved"]
        assert {f["source"] for f in moved} == (set() if deaf else {"r0"}), "a deaf server finishes them"
        await until(lambda: not a.running)
        requests = len(a.requests)
        await task
        job.check()
        job.reported_once()
        assert len(a.requests) == requests
        assert [f for e, f in job.events if e == "sample.moved"] == moved, "nothing was wanted of it any more"
        assert not [f for e, f in job.events if e == "sample.retried"], "a planned move is no failure"

    play(tmp_path, scenario)


def test_the_last_server_may_leave_too_and_its_samples_wait(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        a = await job.server("r0", step=0.005)
        task = asyncio.create_task(job.generate())
        await until(lambda: a.tokens_sent > 20)
        job.fleet.retire("r0")
        await until(lambda: job.generator.left("r0"))
        assert not task.done()
        await job.server("r1", step=0.001)
        await task
        job.check()

    play(tmp_path, scenario)


def test_cancelling_keeps_tokens_and_ends_requests(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        a = await job.server("r0", step=0.005)
        task = asyncio.create_task(job.generate())
        await until(lambda: a.tokens_sent > 40)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not a.running)
        samples = job.store.samples.samples(1)
        assert {s.state for s in samples} <= {State.PENDING, State.GENERATED}
        assert sum(len(s.tokens) for s in samples) > 0
        await job.generate()
        job.check()
        keys = [s.key for s in job.finished]
        assert len(keys) == len(set(keys))

    play(tmp_path, scenario)


def test_a_restarted_coordinator_goes_on_and_aborts_what_the_old_one_left(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        a = await job.server("r0", step=0.005)
        task = asyncio.create_task(job.generate())
        await until(lambda: a.tokens_sent > 60 and any(s.tokens for s in job.store.samples.samples(1)))
        # As after kill -9: the store is left as the last flush made it, and nobody says goodbye.
        old = job.generator
        job.store.close()
        a.cut()
        with pytest.raises(Exception, match="closed"):
            await task
        await old.close()
        await until(lambda: not a.sockets)
        before = len(a.aborted)
        job.finished.clear()
        job.open()
        left = {s for ids in job.generator._shared.leftovers.values() for s in ids}
        kept = sum(len(s.tokens) for s in job.store.samples.samples(1))
        assert kept > 0
        assert left
        done = job.store.samples.counts(1).get(State.GENERATED, 0)
        a.join(job.fleet)
        await job.generate()
        await until(lambda: left <= set(a.aborted[before:]))
        job.check()
        assert len(job.finished) == job.count - done

    play(tmp_path, scenario)


def test_a_server_of_another_release_ends_the_job_with_its_words(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        (await job.server("r0")).faults["version"] = None
        with pytest.raises(
            GenerationError, match="a message is of version 2; use rollout and coordinator images of one"
        ):
            await job.generate()

    play(tmp_path, scenario)


def test_a_stop_string_across_the_cut_is_seen_because_its_tokens_are_made_again(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        a, b = await job.server("r0"), await job.server("r1")
        a.die_after = 90
        await job.generate()
        job.check()
        prompts = {s.seed: len(s.prompt_tokens) for s in job.finished}
        cuts = []
        for r in b.requests:
            seed = r["sampling_params"]["extra_args"]["dt_seed"]
            kept = len(r["token_ids"]) - prompts[seed]
            had = max(
                (len(r2["token_ids"]) - prompts[seed] for r2 in a.requests if r2["request_id"] == r["request_id"]),
                default=0,
            )
            cuts.append((kept, had))
        assert all(r["sampling_params"]["stop"] == ["</s>!"] for r in b.requests)
        # Events come at tokens 1, 5, 9, ...: five bytes of stop string make four tokens be generated again.
        assert {kept % 4 for kept, _ in cuts if kept} <= {1}

    play(tmp_path, scenario, generation={"stop": ["</s>!"]})


def test_a_response_that_was_complete_but_for_the_note_is_finished_without_a_server(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        from dovetail.coordinator.store.samples import Assignment, Delta, Key

        key = Key(1, 0, 0)
        (attempt,) = job.store.samples.assign([Assignment(key, "gone", "0", 1, 0)])
        tokens = list(range(MAX_TOKENS))
        job.store.samples.record([Delta(key, attempt, 0, tokens, [-1.0] * MAX_TOKENS)])
        job.store.samples.release([(key, attempt)])
        server = await job.server("r0")
        await job.generate()
        sample = job.store.samples.get(key)
        assert (sample.tokens.tolist(), sample.finish_reason) == (tokens, "length")
        assert len(server.requests) == job.count - 1

    play(tmp_path, scenario)


def test_a_full_context_ends_a_response_by_length(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.server("r0", max_model_len=12)
        await job.generate()
        for sample in job.finished:
            assert len(sample.prompt_tokens) + len(sample.tokens) <= 12
            assert sample.finished or len(sample.prompt_tokens) + len(sample.tokens) == 12

    play(tmp_path, scenario)


def test_tokens_are_stored_in_batches(tmp_path: Path) -> None:
    """What a token costs the coordinator is mostly its share of a transaction."""

    async def scenario(job: Job) -> None:
        for name in ("r0", "r1"):
            await job.server(name, step=0.0)
        transactions = 0
        begin = job.store._db._connection.set_trace_callback

        def trace(statement: str) -> None:
            nonlocal transactions
            transactions += statement.startswith("BEGIN")

        begin(trace)
        result = await job.generate()
        job.check()
        assert transactions < result.tokens / 10

    play(tmp_path, scenario, count=64, generation={"maxTokens": 128}, settings=GenerationSettings())
