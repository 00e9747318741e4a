"""Plans, made in a worker process with a deadline: a search that takes long must not hold up the other jobs."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from dovetail.api.manifest import ManifestError, parse
from dovetail.api.plan import Plan
from dovetail.api.resolve import resolve
from dovetail.api.rules import check
from dovetail.api.types import RLHFJob, RLHFJobSpec
from dovetail.operator import names, reasons
from dovetail.operator.children import Children, Object, label
from dovetail.operator.reconcile import Refused
from dovetail.operator.render.config_map import spec_hash
from dovetail.planner.simple import PlanError, make_plan

REMEMBERED = 5000


def read_job(document: Object) -> RLHFJob | Refused:
    """The manifest with its defaults, all rules checked."""
    metadata = document["metadata"]
    kept = {key: metadata[key] for key in ("name", "namespace", "labels", "annotations") if key in metadata}
    manifest = {"apiVersion": document["apiVersion"], "kind": document["kind"], "metadata": kept}
    try:
        job = parse(manifest | {"spec": document.get("spec")})
    except ManifestError as error:
        return Refused(reasons.INVALID_SPEC, str(error))
    if errors := check(job.spec):
        return Refused(reasons.INVALID_SPEC, " ".join(errors))
    return job.model_copy(update={"spec": resolve(job.spec)})


def _serve(pipe: Connection, make: Callable[[RLHFJobSpec], Plan]) -> None:
    """The worker process: specs in, plans or sentences out."""
    while True:
        try:
            text = pipe.recv_bytes().decode()
        except EOFError:
            return
        try:
            plan = make(RLHFJobSpec.model_validate_json(text))
            answer = b"+" + plan.model_dump_json().encode()
        except PlanError as error:
            answer = b"-" + str(error).encode()
        except Exception as error:
            answer = b"!" + f"{type(error).__name__}: {error}".encode()
        pipe.send_bytes(answer)


class Planner:
    """One worker process, started on first use and replaced when it misses its deadline. `make` must be importable."""

    def __init__(self, seconds: float, make: Callable[[RLHFJobSpec], Plan] = make_plan) -> None:
        self._seconds = seconds
        self._make = make
        self._lock = asyncio.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None
        self._known: dict[tuple[str, str], Plan | Refused] = {}

    async def planned(self, document: Object, children: Children) -> tuple[RLHFJob, Plan] | Refused:
        """The plan in the job's ConfigMap once it has started or while the spec is the same, else a new one."""
        job = read_job(document)
        if isinstance(job, Refused):
            return job
        uid, wanted = str(document["metadata"]["uid"]), spec_hash(job)
        made = children.get("ConfigMap", names.plan_config_map(job.metadata.name))
        jobset = children.get("JobSet", job.metadata.name)
        if made is not None and label(made, names.UID_LABEL) == uid:
            same = (made["metadata"].get("annotations") or {}).get(names.SPEC_HASH) == wanted
            started = jobset is not None and label(jobset, names.UID_LABEL) == uid
            if (same or started) and (plan := _stored(made)) is not None:
                return job, plan
        key = (uid, wanted)
        if key not in self._known:
            while len(self._known) >= REMEMBERED:
                self._known.pop(next(iter(self._known)))
            async with self._lock:
                self._known[key] = await self._ask(job.spec)
        found = self._known[key]
        if isinstance(found, Refused) and found.reason != reasons.INFEASIBLE:
            del self._known[key]  # a planner that was too slow or broke may do better next time
        return found if isinstance(found, Refused) else (job, found)

    async def close(self) -> None:
        """End the worker process."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.join)
            assert self._pipe is not None
            self._pipe.close()
            self._process = self._pipe = None

    async def _ask(self, spec: RLHFJobSpec) -> Plan | Refused:
        if self._process is None or not self._process.is_alive():
            await self.close()
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._make), daemon=True, name="planner")
            await asyncio.to_thread(self._process.start)
            theirs.close()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(spec.model_dump_json().encode())
            if not await asyncio.to_thread(self._pipe.poll, self._seconds):
                await self.close()
                return Refused(reasons.PLANNER_TIMEOUT, f"the planner found no plan within {self._seconds:g} s")
            answer = self._pipe.recv_bytes().decode()
        except (EOFError, OSError) as error:
            await self.close()
            return Refused(reasons.PLANNER_FAILED, f"the planner's process died: {error or 'no answer'}")
        kind, text = answer[0], answer[1:]
        if kind == "+":
            return Plan.model_validate_json(text)
        return Refused(reasons.INFEASIBLE if kind == "-" else reasons.PLANNER_FAILED, text)


def _stored(config_map: Object) -> Plan | None:
    try:
        return Plan.model_validate_json(config_map["data"]["plan.json"])
    except (KeyError, ValueError):
        return None
