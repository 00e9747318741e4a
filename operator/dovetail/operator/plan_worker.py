"""Makes plans in a worker process with a deadline, so that a long search does not delay other jobs."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from dovetail.gpus.gpu_products import GPU, estimate, is_known
from dovetail.kube import names
from dovetail.kube.resources import CONFIG_MAP, JOBSET
from dovetail.manifest.checks.name_rules import check_name
from dovetail.manifest.checks.rules import check
from dovetail.manifest.documents import ManifestError, parse
from dovetail.manifest.field_policy import at_path
from dovetail.manifest.resolve import resolve, with_lag
from dovetail.manifest.types import RLHFJob, RLHFJobSpec
from dovetail.operator.cluster.object_cache import TOO_LARGE, Key, values_of
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.children import Children, Object
from dovetail.operator.reconcile.reconcile import PLANNER_AGAIN_SECONDS, PlanRefused
from dovetail.operator.render.config_map import planned_hash, spec_hash
from dovetail.operator.render.context import digest
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.endings import cancel

V = TypeVar("V")

MOST_ANSWERS = 5000
# The maximum number of characters of JSON of all answers. In memory they take about ten times as much.
MOST_TEXT = 8 << 20
# The memory for manifests that were read, as `_memory` estimates it. Others are read again with each of their events.
READ_BYTES = 64 << 20
# No ConfigMap holds a larger plan.
PLAN_BYTES = 1 << 20
IDLE_SECONDS = 60.0
START_SECONDS = 60.0  # for the start of the planner's process, with its imports
# The time that `planned` waits for a plan if no other plan comes first. Most plans take less.
PATIENCE_SECONDS = 2.0


def read_job(document: Object, *, started: bool = False) -> RLHFJob | PlanRefused:
    """The manifest with its defaults, after all rules were checked. `started` says that the job has a JobSet. It has
    passed the rules then, and a rule that a later version adds does not stop it."""
    metadata = document["metadata"]
    kept = {key: metadata[key] for key in ("name", "namespace", "labels", "annotations") if key in metadata}
    manifest = {"apiVersion": document["apiVersion"], "kind": document["kind"], "metadata": kept}
    try:
        job = parse(manifest | {"spec": document.get("spec")})
    except ManifestError as error:
        return PlanRefused(reasons.INVALID_SPEC, str(error))
    if not started and (errors := [*check_name(job.metadata.name, job.spec), *check(job.spec)]):
        return PlanRefused(reasons.INVALID_SPEC, " ".join(errors))
    return job.model_copy(update={"spec": resolve(job.spec)})


def _serve(pipe: Connection, make: Callable[[RLHFJobSpec], Plan] | None, gpus: Mapping[str, GPU]) -> None:
    """The worker process. It reads specs and answers with plans or error sentences."""
    # This is imported only here, because it takes more memory than the rest of the operator.
    from dovetail.planner.make_plan import PlanError, make_plan

    while True:
        try:
            text = pipe.recv_bytes().decode()
        except EOFError:
            return
        try:
            spec = RLHFJobSpec.model_validate_json(text)
            plan = make(spec) if make is not None else make_plan(spec, measured=gpus)
            answer = b"+" + plan.model_dump_json().encode()
            if len(answer) > PLAN_BYTES:
                answer = f"-{_too_large(len(answer))}".encode()
        except PlanError as error:
            answer = b"-" + str(error).encode()
        except Exception as error:
            answer = b"!" + f"{type(error).__name__}: {error}".encode()
        pipe.send_bytes(answer)


def _exchange(pipe: Connection, text: bytes, seconds: float) -> bytes:
    """Send a spec and receive the answer. A large spec can be sent only while the process reads, so this waits for its
    start. Raises TimeoutError, EOFError and OSError."""
    pipe.send_bytes(text)
    if not pipe.poll(seconds):
        raise TimeoutError
    return pipe.recv_bytes()


def _too_large(size: int) -> str:
    return (
        f"the plan has {size >> 10} KiB, and a ConfigMap holds {PLAN_BYTES >> 10} KiB; give spec.groups fewer replicas"
    )


@dataclass
class _Asked:
    """A plan that is to be made, and the jobs that wait for it. `begun` says that the planner works on it. `waiters` is
    the number of calls that wait for it."""

    spec: RLHFJobSpec
    answer: asyncio.Future[Plan | PlanRefused]
    jobs: set[Key] = field(default_factory=set)
    begun: bool = False
    waiters: int = 0


@dataclass
class _Read:
    """A job as it was read last, and the plan in its ConfigMap."""

    version: tuple[str, ...]
    job: RLHFJob
    hash: str
    text: str = ""
    plan: Plan | None = None
    written: str = ""
    written_hash: str | None = None

    def planned_so(self, config_map: Object) -> bool:
        """Whether the plan in a ConfigMap was made for this job as it is now."""
        text = str((config_map.get("data") or {}).get("job.json"))
        if text != self.written:
            self.written, self.written_hash = text, planned_hash(text)
        return self.written_hash == self.hash

    def stored(self, config_map: Object, known: Remembered[tuple[str, Plan]]) -> Plan | None:
        """The plan in a ConfigMap. None if it cannot be read. `known` has plans by their text, so that equal jobs share
        a plan and its text."""
        text = str((config_map.get("data") or {}).get("plan.json"))
        if text != self.text:
            found = known.get(text)
            if found is None:
                try:
                    # A later version's plan may have more fields.
                    found = text, Plan.model_validate_json(text, extra="ignore")
                except ValueError:
                    self.text, self.plan = text, None
                    return None
                known.put(text, found, len(text))
            self.text, self.plan = found
        return self.plan


def _of_begun(refused: PlanRefused) -> PlanRefused:
    """The refusal of a job that has begun. It says which fields that its sentence names cannot change any more."""
    named = dict.fromkeys(re.findall(r"spec\.([\w.\[\]]*\w)", refused.message))
    fixed = [f"spec.{path}" for path in named if not at_path(RLHFJobSpec, path).resumed]
    if not fixed:
        return refused
    kept = f"the job has begun, so {' and '.join(fixed)} cannot change any more; only a new job can have another value"
    return replace(refused, message=f"{refused.message} ({kept})")


def _size(answer: Plan | PlanRefused) -> int:
    return len(answer.message) if isinstance(answer, PlanRefused) else len(answer.model_dump_json())


def _memory(document: Object) -> int:
    """The approximate memory in bytes of a manifest that was read. Its job.json is kept as well."""
    text = json.dumps(document.get("spec") or {}, separators=(",", ":"))
    return 4096 + 2 * len(text) + 200 * values_of(text)


class Planner:
    """One worker process, started on first use, replaced when it misses its deadline, and ended after IDLE_SECONDS
    without work. Namespaces take turns, so that slow plans of one tenant do not delay those of others for long. `make`
    must be importable. Its default is `dovetail.planner.make_plan.make_plan`. `clock` returns monotonic seconds."""

    def __init__(
        self,
        seconds: float,
        make: Callable[[RLHFJobSpec], Plan] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._make = make
        self._clock = clock
        # This is called with each job that `planned` did not wait for. If it is None, `planned` always waits.
        self.done: Callable[[Key], Awaitable[None]] | None = None
        self._asked: dict[str, _Asked] = {}  # by the spec's hash
        self._waits: dict[Key, str] = {}  # the one hash that a job waits for
        # The hashes of each namespace, in the order of turns. Some may be made or given up by now.
        self._queues: OrderedDict[str, dict[str, None]] = OrderedDict()
        self._asking: asyncio.Task[None] | None = None
        self._failed: Remembered[tuple[float, PlanRefused]] = Remembered()  # with their end time, by the spec's hash
        self._given: dict[str, GPU] = {}  # described by the administrator
        self._found: dict[str, GPU] = {}  # found on nodes
        self._stale = False
        self.guess: Callable[[], bool] = lambda: False
        self._lock = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._process: Any = None
        self._pipe: Connection | None = None
        self._known: Remembered[Plan | PlanRefused] = Remembered()  # by the spec's hash
        self._read: Remembered[_Read] = Remembered(READ_BYTES)  # by namespace/name
        self._stored: Remembered[tuple[str, Plan]] = Remembered()  # by their text in ConfigMaps
        self._variants: Remembered[Plan | PlanRefused] = Remembered()  # by the spec's digest
        self._waiting: dict[str, set[Key]] = {}  # jobs that wait for variants
        self._varying: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # one variant at a time, so that new jobs wait for one at most

    async def planned(self, document: Object, children: Children) -> tuple[RLHFJob, Plan] | PlanRefused:
        """The plan in the job's ConfigMap if the job has started or its spec is unchanged. Otherwise it is a new plan.
        `children` has the objects that the job controls. A plan that takes long is refused with the reason Planning,
        and `done` is called when it is there."""
        if (problem := document.get(TOO_LARGE)) is not None:
            return PlanRefused(reasons.INVALID_SPEC, str(problem))
        started = children.get(JOBSET.kind, document["metadata"]["name"]) is not None
        read = self._job(document, started)
        if isinstance(read, PlanRefused):
            return read
        job, wanted = read.job, read.hash
        made = children.get(CONFIG_MAP.kind, names.plan_config_map(job.metadata.name))
        plan = None if made is None else read.stored(made, self._stored)
        if made is not None and plan is not None and (started or read.planned_so(made)):
            return job, plan
        asked = job
        begun = plan is not None and bool((document.get("status") or {}).get("stage"))
        if plan is not None and begun:
            # Its samples are drawn by this lag. Auto could choose another one for other pods.
            asked = job.model_copy(update={"spec": with_lag(job.spec, plan.lag)})
            wanted = spec_hash(asked)
        found = self._answer(wanted) or await self._new(asked, wanted)
        if isinstance(found, PlanRefused):
            return _of_begun(found) if begun else found
        return job, found

    def _answer(self, wanted: str) -> Plan | PlanRefused | None:
        """The known answer for the spec with this hash. A failure of the planner counts for some time."""
        until, failed = self._failed.get(wanted) or (0.0, None)
        return self._known.get(wanted) or (failed if self._clock() < until else None)

    async def _new(self, job: RLHFJob, wanted: str) -> Plan | PlanRefused:
        """Have a plan made, and wait for it as long as is allowed."""
        key, asked = (job.metadata.namespace or "", job.metadata.name), self._asked.get(wanted)
        if asked is None:
            answer: asyncio.Future[Plan | PlanRefused] = asyncio.get_running_loop().create_future()
            asked = self._asked[wanted] = _Asked(job.spec, answer)
        if not asked.begun:
            # Another namespace may have asked for the same plan, but have other plans before it.
            self._queues.setdefault(key[0], {})[wanted] = None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_in_turn())
        asked.waiters += 1
        try:
            if self.done is None:
                return await asyncio.shield(asked.answer)
            # At most one worker waits, so that the others are free for jobs that have a plan.
            if len(self._asked) == 1 and not asked.jobs:
                await asyncio.wait({asked.answer}, timeout=PATIENCE_SECONDS)
        finally:
            asked.waiters -= 1
        if asked.answer.done():
            return asked.answer.result()
        if self._waits.get(key) != wanted:
            self._give_up(key)
            self._waits[key] = wanted
        asked.jobs.add(key)
        return PlanRefused(reasons.PLANNING, "the planner is at work on this job, or on jobs before it")

    def forget(self, key: Key) -> None:
        """Keep nothing of a job that is gone."""
        self._read.drop("/".join(key))
        self._give_up(key)

    def _give_up(self, key: Key) -> None:
        """Make no plan for a job that is gone or has another manifest, unless another job waits for the same plan."""
        wanted = self._waits.pop(key, "")
        asked = self._asked.get(wanted)
        if asked is not None:
            asked.jobs.discard(key)
            if not (asked.jobs or asked.begun or asked.waiters):
                del self._asked[wanted]

    async def _ask_in_turn(self) -> None:
        """Ask for one plan of each namespace after the other, until nobody waits."""
        while self._queues:
            namespace, hashes = next(iter(self._queues.items()))
            del hashes[wanted := next(iter(hashes))]
            if not hashes:
                del self._queues[namespace]
            asked = self._asked.get(wanted)
            if asked is None:
                continue
            asked.begun = True
            try:
                async with self._lock:
                    found = await self._ask(asked.spec)
                    self._rest()
            except Exception as error:
                found = PlanRefused(reasons.PLANNER_FAILED, f"{type(error).__name__}: {error}")
            # A planner that was too slow or broke may do better next time.
            if isinstance(found, PlanRefused) and found.reason != reasons.INFEASIBLE:
                self._failed.put(wanted, (self._clock() + PLANNER_AGAIN_SECONDS / 2, found), _size(found))
            else:
                self._known.put(wanted, found, _size(found))
            if namespace in self._queues:
                self._queues.move_to_end(namespace)
            del self._asked[wanted]
            asked.answer.set_result(found)
            for key in asked.jobs:
                del self._waits[key]
            if self.done is not None:
                for key in asked.jobs:
                    await self.done(key)

    def use(self, given: Mapping[str, GPU] | None = None, found: Mapping[str, GPU] | None = None) -> None:
        """Plan with these GPUs from now on. `given` are those that the administrator describes, and `found` those that
        nodes have and no table knows. Plans that were made without them are forgotten."""
        before = self._given, self._found
        self._given = dict(given) if given is not None else self._given
        self._found = dict(found) if found is not None else self._found
        if before != (self._given, self._found):
            self._known.clear()
            self._failed.clear()
            self._variants.clear()
            self._stale = True

    def _guess(self, spec: RLHFJobSpec) -> None:
        """Estimate a GPU product from its name, if nodes cannot be listed and so its figures are unknown."""
        asked = {str(group.gpu.product) for group in spec.groups if not group.on_cpu}
        new = {name: estimate(name) for name in asked if not is_known(name, {**self._found, **self._given})}
        if new and self.guess():
            self.use(found={**self._found, **new})

    def variant(self, job: Key, spec: RLHFJobSpec, done: Callable[[Key], Awaitable[None]]) -> Plan | PlanRefused | None:
        """The plan for other sizes of the job's spec, if it is known. Otherwise None, and `done` is called when it is
        known."""
        wanted = digest(spec.model_dump(mode="json", by_alias=True))
        if (found := self._variants.get(wanted)) is not None:
            return found
        if wanted not in self._waiting:
            self._waiting[wanted] = set()
            task = asyncio.create_task(self._vary(wanted, spec, done))
            self._varying.add(task)
            task.add_done_callback(self._varying.discard)
        self._waiting[wanted].add(job)
        return None

    async def _vary(self, wanted: str, spec: RLHFJobSpec, done: Callable[[Key], Awaitable[None]]) -> None:
        try:
            async with self._turn, self._lock:
                # Any answer is kept. Otherwise it would be asked for again with every event of the job.
                found = await self._ask(spec)
                self._variants.put(wanted, found, _size(found))
                self._rest()
        finally:
            waiting = self._waiting.pop(wanted)
        for job in waiting:
            await done(job)

    def _job(self, document: Object, started: bool) -> _Read | PlanRefused:
        """The result of `read_job`. A manifest is read only once, because the job is looked at again with every
        event."""
        metadata = document["metadata"]
        key = f"{metadata.get('namespace') or ''}/{metadata['name']}"
        version = (str(started), *(str(metadata.get(each)) for each in ("uid", "generation", "labels", "annotations")))
        known = self._read.get(key)
        if known is not None and known.version == version:
            return known
        job = read_job(document, started=started)
        if isinstance(job, PlanRefused):
            return job
        read = _Read(version, job, spec_hash(job))
        self._read.put(key, read, _memory(document))
        return read

    async def close(self) -> None:
        """End the worker process."""
        tasks = [task for task in (*self._varying, self._asking) if task is not None and not task.done()]
        await cancel(tasks)
        for asked in self._asked.values():
            asked.answer.cancel()
        await self._end()
        if self._ending is not None:
            await self._ending

    async def _end(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None  # another call may come before the process has ended
        if process is not None and pipe is not None:
            process.kill()
            await asyncio.to_thread(process.join)
            pipe.close()

    def _rest(self) -> None:
        """End the worker process if it has had no work for some time."""

        async def end() -> None:
            async with self._lock:
                await self._end()

        def ended() -> None:
            self._ending = asyncio.create_task(end())

        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, ended)

    async def _ask(self, spec: RLHFJobSpec) -> Plan | PlanRefused:
        self._guess(spec)
        if self._stale or self._process is None or not self._process.is_alive():
            await self._end()
            self._stale = False
            context = multiprocessing.get_context("spawn")
            pipe, theirs = context.Pipe()
            gpus = {**self._found, **self._given}
            process = context.Process(target=_serve, args=(theirs, self._make, gpus), daemon=True, name="planner")
            await asyncio.to_thread(process.start)
            theirs.close()
            self._pipe, self._process = pipe, process
        assert self._pipe is not None
        try:
            text = spec.model_dump_json().encode()
            async with asyncio.timeout(self._seconds + START_SECONDS):
                answer = await asyncio.to_thread(_exchange, self._pipe, text, self._seconds)
        except TimeoutError:
            await self._end()
            return PlanRefused(reasons.PLANNER_TIMEOUT, f"the planner found no plan within {self._seconds:g} s")
        except (EOFError, OSError) as error:
            await self._end()
            return PlanRefused(reasons.PLANNER_FAILED, f"the planner's process died: {str(error) or 'no answer'}")
        except asyncio.CancelledError:
            # Otherwise its answer would count as that of the next spec. The thread that still reads sees the end, and
            # closes.
            self._process.kill()
            self._process = self._pipe = None
            raise
        kind, said = answer[:1], answer[1:].decode()
        if kind == b"+":
            return Plan.model_validate_json(said)
        return PlanRefused(reasons.INFEASIBLE if kind == b"-" else reasons.PLANNER_FAILED, said)


class Remembered(Generic[V]):
    """The newest answers that can be computed again, by key. There are at most MOST_ANSWERS, and their sizes are at
    most `most_size` together, but the last one is always kept. The caller chooses the unit of sizes. The default is
    characters."""

    def __init__(self, most_size: int = MOST_TEXT) -> None:
        self._most_size = most_size
        self._kept: dict[str, tuple[int, V]] = {}
        self._size = 0

    def put(self, key: str, value: V, size: int) -> None:
        self.drop(key)
        while self._kept and (len(self._kept) >= MOST_ANSWERS or self._size + size > self._most_size):
            self.drop(next(iter(self._kept)))
        self._kept[key] = size, value
        self._size += size

    def get(self, key: str) -> V | None:
        found = self._kept.get(key)
        return None if found is None else found[1]

    def clear(self) -> None:
        self._kept.clear()
        self._size = 0

    def drop(self, key: str) -> None:
        """Forget one answer."""
        size, _ = self._kept.pop(key, (0, None))
        self._size -= size
