"""The process groups of one generation of trainer ranks. They are formed together and dropped together."""

from __future__ import annotations

import gc
import hmac
import itertools
import json
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism
from dovetail.models.layers.token_ranks import TokenRanks
from dovetail.models.links.nccl import board_of
from dovetail.models.links.rendezvous import find_stranger
from dovetail.models.transfer import store_at, store_on
from dovetail.protocol.plan import Coordinates, Layout, chunks_of, coordinates, holds, loops, stage_path, stages_at
from dovetail.trainer import compat
from dovetail.trainer.communication.nccl_streams import StreamPool

_FORMING_SECONDS = 60.0
_FORMED = itertools.count()
# This factor lengthens the deadline of groups whose ranks may wait for others that still compute. For example, a rank
# joins a sum over gradients as soon as it has its own. The executor bounds how long a rank waits with no work left.
_PATIENCE = 20


class PeerLost(RuntimeError):
    """A peer died or sent nothing until the deadline. The groups are useless: close them and join again."""


_LOST = re.compile(
    r"gloo|connection|timed? ?out|timeout|broken pipe|reset by peer|socket|nccl|aborted|store", re.IGNORECASE
)


class _PeerErrors:
    """See `peer_errors`. A context manager from a generator would take several times as long, and the executor enters
    three for each action."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, (RuntimeError, OSError)) or isinstance(error, PeerLost):
            return
        if isinstance(error, dist.DistError) or _LOST.search(str(error)):
            raise PeerLost(f"{self._what}: {transport_sentence(error)}") from error


def peer_errors(what: str) -> _PeerErrors:
    """Turn the transport's errors inside into `PeerLost("<what>: <first line>")`. Other errors pass unchanged."""
    return _PeerErrors(what)


def transport_sentence(error: BaseException) -> str:
    """The first sentence of a transport's message, without its source file and advice."""
    lines = str(error).strip().splitlines()
    first = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", lines[0]) if lines else type(error).__name__
    return first.split(". This is typically", 1)[0]


@dataclass
class Edges:
    """The neighbours of one of this rank's stages, as global ranks. They are None where the model ends, and where the
    neighbour is on this rank too.

    Each edge and direction has a group of its own with two ranks. So two models, or two stages, that share a pair of
    ranks can never take each other's tensors."""

    previous: int | None = None
    next: int | None = None
    forward_in: dist.ProcessGroup | None = None
    forward_out: dist.ProcessGroup | None = None
    backward_in: dist.ProcessGroup | None = None
    backward_out: dist.ProcessGroup | None = None


@dataclass
class ModelGroups:
    """The groups and ranks of one model (`dovetail.protocol.plan.coordinates`).

    `edges` has one entry for each of the model's stages on this rank (`Layout.chunks`). `pp_rank` is the place in the
    pipeline. The last dimensions of `mesh` are dp, over which a stage is sharded, and tp, under names that no other
    mesh has. Where a layout has several pipelines side by side, `copies` joins the ranks with the same shard.
    `replicas` joins all ranks of one stage (and tp rank). They hold the same weights if a stage is not sharded.
    `token_ranks` share the tokens of each pass, and are among those of dp. If experts are divided over ranks,
    `expert_mesh` has the ranks of dp in two dimensions: dp, over which experts are sharded, and ep, over which they are
    divided. `expert_copies` joins all ranks of one stage with the same experts."""

    name: str
    layout: Parallelism
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    mesh: DeviceMesh
    pp_ranks: list[int]
    tp_ranks: list[int]
    pp_group: dist.ProcessGroup
    everyone: dist.ProcessGroup  # all ranks that hold a part of the model; only for its gradient norm
    copies: dist.ProcessGroup | None
    replicas: dist.ProcessGroup
    token_ranks: TokenRanks
    cp_ranks: list[int]
    expert_mesh: DeviceMesh | None
    expert_copies: dist.ProcessGroup | None
    edges: list[Edges]
    tied: dist.ProcessGroup | None  # the first and the last stage
    staged: bool = False  # see `Groups`

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The mesh of the ranks among which this one's layers are split."""
        return _from_last(self.mesh, 1)

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The mesh of the ranks over which a stage is sharded."""
        return _from_last(self.mesh, 2)

    @property
    def expert_dp_mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks over which divided experts are sharded."""
        return None if self.expert_mesh is None else _from_last(self.expert_mesh, 2)

    @property
    def ep_mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks among which the experts of this one's layers are divided, if they are."""
        return None if self.expert_mesh is None else _from_last(self.expert_mesh, 1)

    @property
    def meshes(self) -> list[DeviceMesh]:
        return [self.mesh] if self.expert_mesh is None else [self.mesh, self.expert_mesh]

    @property
    def speaks(self) -> bool:
        """Whether this one of the ranks with the same micro-batches reports what all of them compute."""
        return self.tp_rank == 0 and self.token_ranks.rank == 0

    @cached_property
    def beside(self) -> str:
        """The other ranks of dp and tp, which take part in a pass's collectives, as text for a message. It is empty if
        there are none."""
        return others_of(group for mesh in self.meshes for group in _lines(mesh) if dist.get_world_size(group) > 1)

    @property
    def chunks(self) -> int:
        """The number of the model's stages on this rank."""
        return len(self.edges)

    @property
    def last_rank(self) -> int:
        """The global rank of the model's last stage."""
        return self.pp_ranks[stage_path(self.pp_size, self.chunks, loops(self.layout))[-1]]


def _from_last(mesh: DeviceMesh, number: int) -> DeviceMesh:
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[names[-number]]


def _lines(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """This rank's group of each dimension."""
    return [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]


def others_of(groups: Iterable[dist.ProcessGroup]) -> str:
    """The ranks of these groups except this one, as text for a message."""
    ranks = sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)} - {dist.get_rank()})
    if len(ranks) < 2:
        return "".join(f"trainer rank {rank}" for rank in ranks)
    return f"one of trainer ranks {', '.join(map(str, ranks))}"


class Groups:
    """All groups of this process. `control` is a Gloo group over every rank. `model[name]` holds a model's own groups.

    `elsewhere` holds the layouts of models of which this rank has no part. `planned` holds the layouts with which the
    groups were formed. `staged` means that ranks share a GPU, which NCCL refuses. Then all groups use Gloo, and
    everything that a GPU sends goes through host memory."""

    def __init__(self, rank: int, world_size: int, timeout: timedelta, device: torch.device) -> None:
        self.rank, self.world_size, self.timeout, self.device = rank, world_size, timeout, device
        self.model: dict[str, ModelGroups] = {}
        self.elsewhere: dict[str, Parallelism] = {}
        self.planned: dict[str, Parallelism] = {}
        self._formed: dict[str, list[dist.ProcessGroup]] = {}  # by model, all groups that this rank is in
        self._forming: list[dist.ProcessGroup] = []
        self._streams: list[StreamPool] = []
        self.staged = False
        self.control: dist.ProcessGroup = None
        self._patient: dist.ProcessGroup = None
        self._store: Any = None
        self.meeting = ""
        self._key = b""
        self._made = 0
        # If another thread aborted the groups, this says why.
        self.lost: str | None = None
        self._closed = False
        self._dropping = threading.Lock()
        # Each entry is an event of this GPU that waits for a peer, a sentence about it, and its time; oldest first.
        self._awaited: deque[tuple[Any, str, float]] = deque()

    @classmethod
    def form(
        cls,
        master_host: str,
        master_port: int,
        rank: int,
        world_size: int,
        layouts: dict[str, Parallelism],
        timeout_seconds: float,
        local_rank: int | None = None,
        listening: socket.socket | None = None,
        meeting: str = "",
        token: str = "",
    ) -> Self:
        """Meet the other ranks at rank 0's address and make every group, in the same order on all ranks.

        `local_rank` picks the GPU (default: rank modulo the number of GPUs here). `listening` is a socket that already
        listens at that address. Rank 0's store takes it over and serves it. `meeting` is a file in a folder that only
        this user can open; the ranks then meet there, and nobody else can. `token` is the job's. Every rank proves to
        every peer of a Gloo group that it has it, because Gloo takes whoever connects first. Collectives fail if they
        wait longer than `timeout_seconds`. Raises `PeerLost` if a rank does not come, and `ValueError` for a layout
        whose product is not `world_size`."""
        for name, layout in layouts.items():
            if layout.pp * layout.dp * layout.tp != world_size:
                raise ValueError(
                    f"{name}: pp {layout.pp} x dp {layout.dp} x tp {layout.tp} is not the number of "
                    f"trainer ranks, {world_size}"
                )
        gpu = torch.cuda.is_available()
        device = torch.device("cpu")
        if gpu:
            device = torch.device("cuda", rank % torch.cuda.device_count() if local_rank is None else local_rank)
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_seconds)
        self = cls(rank, world_size, timeout, device)
        self.planned = dict(layouts)
        try:
            with peer_errors("forming the trainer's groups"):
                # Starting up may take longer than a message, because ranks start seconds apart.
                patience = max(timeout, timedelta(seconds=_FORMING_SECONDS))
                if meeting:
                    self.meeting = meeting
                    self._store = dist.FileStore(meeting, world_size)
                    self._store.set_timeout(patience)
                elif rank == 0 and listening is not None:
                    self._store = store_on(listening, world_size, patience)
                elif rank == 0:
                    self._store = store_at(master_host, master_port, world_size, patience)
                else:
                    self._store = dist.TCPStore(master_host, master_port, world_size, timeout=patience)
                if rank == 0:
                    self._store.set("nonce", secrets.token_hex(16))
                self._key = token.encode() + bytes(self._store.get("nonce"))
                self.staged = gpu and self._ranks_share_a_gpu()
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if gpu and not self.staged else "gloo",
                    store=self._store,
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                )
                everyone = range(world_size)
                self._prove(dist.group.WORLD, everyone)
                self.control = dist.new_group(backend="gloo", timeout=timeout)
                self._prove(self.control, everyone)
                self._patient = dist.new_group(backend="gloo", timeout=timeout * _PATIENCE)
                self._prove(self._patient, everyone)
                for name in sorted(layouts):
                    self._form_model(name, layouts[name])
                self._warm_up(self.model)
        except BaseException:
            self.close()
            raise
        return self

    def _ranks_share_a_gpu(self) -> bool:
        """Whether two ranks are on one GPU. The result is the same on every rank. It waits until all ranks have
        come."""
        self._store.set(f"gpu/{self.rank}", board_of(self.device))
        if self.rank == 0:
            # The other ranks ask only for the result. So the store gets few requests even from many ranks.
            found = [self._store.get(f"gpu/{rank}") for rank in range(self.world_size)]
            self._store.set("gpus", "shared" if len(set(found)) < len(found) else "own")
        return bytes(self._store.get("gpus")) == b"shared"

    def _form_model(self, name: str, layout: Parallelism) -> None:
        """Make a model's groups. Every rank must call it, even if it holds no part of the model."""
        self.model.pop(name, None)
        self.elsewhere.pop(name, None)
        self._forming = self._formed[name] = []
        members = [rank for rank in range(self.world_size) if holds(rank, layout)]
        here = self.rank in members
        pipelines = layout.pipelines if isinstance(layout, Layout) else 1
        shards = layout.dp // pipelines
        ranks = torch.empty(layout.pp, layout.dp, layout.tp, dtype=torch.int64)
        for rank in members:
            ranks[tuple(coordinates(rank, layout))] = rank
        pp, dp, tp = coordinates(self.rank, layout) if here else (-1, -1, -1)
        # torch caches meshes, and specs of DTensors, by ranks and names. Without new names a tensor would get an older
        # mesh and its groups, on ranks that were in these, and not on ranks that came later.
        formed = next(_FORMED)
        data, tensor, experts = f"dp-{formed}", f"tp-{formed}", f"ep-{formed}"
        names: tuple[str, ...] = ("pp", data, tensor)
        grid = ranks
        if pipelines > 1:
            names = ("pp", "copies", data, tensor)
            grid = ranks.view(layout.pp, pipelines, shards, -1)
        crowded = is_crowded(layout)
        by_tokens = ranks.view(layout.pp, -1, layout.cp, layout.tp)
        sharing = self._groups_along(by_tokens, 2, crowded) if layout.cp > 1 else None
        along = [self._groups_along(grid, dim, crowded) for dim in range(grid.ndim)]
        replicas = along[1]
        if 1 < pipelines < layout.dp:
            for stage in range(layout.pp):
                for t in range(layout.tp):
                    group = self._new_group(ranks[stage, :, t].tolist(), first=crowded)
                    replicas = group if (stage, t) == (pp, tp) else replicas
        expert_mesh = expert_copies = None
        if layout.ep > 1:
            # Ranks that follow each other share a layer's experts. (Layers with experts have tp 1.)
            spread = ranks.view(layout.pp * pipelines, shards // layout.ep, layout.ep * layout.tp)
            lines = [self._groups_along(spread, dim, crowded) for dim in (1, 2)]
            expert_copies = lines[0]
            if pipelines > 1:
                expert_copies = self._groups_along(ranks.view(layout.pp, -1, layout.ep * layout.tp), 1, crowded)
            if here:
                mine = spread[(spread == self.rank).any(-1).any(-1)][0]
                expert_mesh = DeviceMesh.from_group(lines, self.device.type, mine, mesh_dim_names=(data, experts))
        path = stage_path(layout.pp, chunks_of(layout), loops(layout))
        own = stages_at(pp, layout.pp, chunks_of(layout), loops(layout))
        edges = {stage: Edges() for stage in own}
        tied = None
        for d in range(layout.dp):
            for t in range(layout.tp):
                mine = (d, t) == (dp, tp)
                column = ranks[:, d, t].tolist()
                for stage, (place, onward) in enumerate(pairwise(path)):
                    if place == onward:
                        continue
                    pair = [column[place], column[onward]]
                    there, back = self._new_group(pair), self._new_group(pair)
                    if mine and pp == place:
                        before = edges[stage]
                        before.next, before.forward_out, before.backward_in = pair[1], there, back
                    if mine and pp == onward:
                        after = edges[stage + 1]
                        after.previous, after.forward_in, after.backward_out = pair[0], there, back
                if layout.pp > 1:
                    group = self._new_group([column[0], column[-1]], first=crowded)
                    if mine and pp in (0, layout.pp - 1):
                        tied = group
        everyone = self._new_group(members, _PATIENCE, first=crowded)
        if not here:
            self.elsewhere[name] = layout
            return
        # DeviceMesh does not make these groups itself, because its own groups have torch's deadline of 10 or 30
        # minutes.
        mesh = DeviceMesh.from_group([g for g in along if g is not None], self.device.type, grid, mesh_dim_names=names)
        self.model[name] = ModelGroups(
            name=name,
            layout=layout,
            pp_rank=pp,
            pp_size=layout.pp,
            dp_rank=dp,
            dp_size=layout.dp,
            tp_rank=tp,
            tp_size=layout.tp,
            mesh=mesh,
            pp_ranks=ranks[:, dp, tp].tolist(),
            tp_ranks=ranks[pp, dp].tolist(),
            pp_group=mesh.get_group("pp"),
            everyone=everyone,
            copies=mesh.get_group("copies") if pipelines > 1 else None,
            replicas=replicas,
            token_ranks=TokenRanks(sharing),
            cp_ranks=by_tokens[pp, dp // layout.cp, :, tp].tolist(),
            expert_mesh=expert_mesh,
            expert_copies=expert_copies,
            edges=[edges[stage] for stage in own],
            tied=tied,
            staged=self.staged,
        )

    def _groups_along(self, grid: torch.Tensor, dim: int, first: bool) -> dist.ProcessGroup | None:
        """Make the groups of all lines of ranks along one dimension. Returns this rank's group, or None if it is not in
        the grid. The groups of the first dimension also take tensors in host memory."""
        mine = None
        for line in grid.movedim(dim, -1).flatten(0, -2).tolist():
            group = self._new_group(line, host=dim == 0, first=first)
            mine = group if self.rank in line else mine
        return mine

    def _new_group(
        self, ranks: list[int], patience: int = 1, host: bool = False, first: bool = False
    ) -> dist.ProcessGroup:
        """A group for tensors on the trainer's device, and also for tensors in host memory if `host`. On GPUs, other
        groups have no Gloo, because Gloo's ranks would connect too. With `first`, its operations go first on a GPU."""
        on_gpu = self.device.type == "cuda" and not self.staged
        backend = None if host else "nccl" if on_gpu else "gloo"
        options = None
        if first and backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = self.timeout * patience
        group = dist.new_group(ranks, timeout=self.timeout * patience, backend=backend, pg_options=options)
        if self.rank in ranks:
            self._forming.append(group)
        if backend != "nccl":
            self._prove(group, ranks)
        return group

    def _prove(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        """Show each peer of a new group that this rank is of the job, and check the peers. Call it on all ranks in the
        same order. A proof is for one pair of one group, so nobody can use it again. Raises PeerLost."""
        self._made += 1
        if self.rank not in ranks:
            return

        def proof(sender: int, receiver: int) -> bytes:
            return hmac.digest(self._key, f"{self._made} {sender} {receiver}".encode(), "sha256")

        def send(proof: Tensor, other: int) -> Callable[[], object]:
            work = dist.isend(proof, other, group=group)
            assert work is not None
            finish: Callable[[], object] = work.wait
            return finish

        others = [rank for rank in ranks if rank != self.rank]
        stranger = find_stranger(
            self.rank, others, proof, send, lambda into, other: dist.recv(into, other, group=group)
        )
        if stranger is not None:
            raise PeerLost(f"what connected as trainer rank {stranger} is no rank of this job")

    def _warm_up(self, models: Iterable[str]) -> None:
        """Use every group once as it will be used later, in the same order on all ranks.

        NCCL makes a communicator at its first use, and this waits for the peers. Messages and collectives use different
        communicators. A rank that posts a receive early would wait in it, before it sends what its peer waits for."""
        dist.all_reduce(torch.zeros(1), group=self.control)
        if self.device.type == "cuda" and not self.staged:
            self._streams = self._streams or [StreamPool(self.device), StreamPool(self.device, priority=-1)]
        for name in sorted(models):
            model = self.model[name]
            for pool in self._streams:
                pool.release(name)
            meshed = [group for mesh in model.meshes for group in _lines(mesh)]
            groups = [model.everyone, *meshed, model.tied, model.replicas, model.token_ranks.group, model.expert_copies]
            for group in {id(group): group for group in groups if group is not None}.values():
                if dist.get_world_size(group) > 1:
                    if group is not model.pp_group:  # pp_group is only used on the current stream
                        self._connecting(name, is_crowded(model.layout))
                    dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            # On every rank edge s comes before edge s + 1, and forward before backward.
            message = torch.zeros(1, device=self.device)
            for edge in model.edges:
                if edge.previous is not None:
                    self._connecting(name)
                    receive(message, edge.previous, edge.forward_in, self.staged)
                    self._connecting(name)
                    send(message, edge.previous, edge.backward_out, self.staged)
                if edge.next is not None:
                    self._connecting(name)
                    send(message, edge.next, edge.forward_out, self.staged)
                    self._connecting(name)
                    receive(message, edge.next, edge.backward_in, self.staged)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _connecting(self, model: str, first: bool = False) -> None:
        """Prepare for the first operation of one of the model's groups, for which NCCL takes a stream. With `first` it
        takes one of the streams that go first."""
        if self._streams:
            self._streams[first].reserve(model)

    def place(self, name: str, layout: Parallelism) -> None:
        """Make the groups of `layout` for a model unless it has them, and drop those that it had. This is a collective
        call. Raises PeerLost."""
        held = self.model[name].layout if name in self.model else self.elsewhere.get(name)
        if held is not None and _same_places(held, layout, self.world_size):
            return
        older, formed = self.model.get(name), self._formed.get(name, [])
        with peer_errors(f"forming the groups of {name}"):
            self._form_model(name, layout)
            self._warm_up([name] if name in self.model else [])
        if self.device.type == "cpu":
            # All ranks have come here, so nobody uses the older groups. Each Gloo group has threads that wake up a
            # hundred times a second. (NCCL's groups stay until `close`, because dropping one would wait for its ranks.)
            for mesh in older.meshes if older is not None else ():
                compat.forget_groups(mesh)
            for group in formed:
                dist.destroy_process_group(group)

    def of(self, model: str) -> ModelGroups:
        """The groups of `model`. A model without a layout of its own (reward) uses the actor's."""
        return self.model.get(model) or self.model["actor"]

    def close(self) -> None:
        """Drop every group, whatever its state. `form` can be called again afterwards. Pending operations of peers in
        these groups fail, so one rank's exit frees all. Never raises."""
        for model in self.model.values():
            # torch's caches keep the meshes of tensor-parallel layers. Their groups would stay alive.
            for mesh in model.meshes:
                compat.forget_groups(mesh)
        self.model.clear()
        self.elsewhere.clear()
        self._formed.clear()
        self._forming = []
        self.control = self._patient = None
        with self._dropping:
            ways = [dist.destroy_process_group]
            if self.device.type == "cuda":
                # Destroying would wait for kernels, and these wait for the lost peer.
                ways.insert(0, compat.abort_all_groups)
            for drop in ways:
                if dist.is_initialized():
                    # A broken group may raise. Its sockets close with the last reference to it.
                    with suppress(Exception):
                        drop()
            self._closed = True
            self._awaited.clear()
        self._store = None
        gc.collect()

    # ------------------------------------------------------------ peers that are lost while a GPU waits for them

    def awaiting(self, peer: str) -> None:
        """Record that the work queued on this GPU so far waits for a peer. `peer` is a sentence about that peer."""
        event = torch.cuda.Event()
        event.record()
        with self._dropping:
            self._awaited.append((event, peer, time.monotonic()))
            self._forget_arrived()

    def overdue(self) -> str | None:
        """One sentence about the peer that this GPU has waited for longest, if that is longer than the groups'
        deadline. Any thread may call it."""
        with self._dropping:
            self._forget_arrived()
            if not self._awaited:
                return None
            _, peer, since = self._awaited[0]
        waited = time.monotonic() - since
        return f"{peer}: nothing came for {waited:.0f} s" if waited > self.timeout.total_seconds() else None

    def abort(self, reason: str) -> None:
        """End all waits in these groups. The thread that uses them gets PeerLost with the reason. Any thread may call
        it."""
        with self._dropping:
            if self._closed or self.lost is not None:
                return
            self.lost = reason
            with suppress(Exception):
                compat.abort_all_groups()

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """After an `abort`, turn any error inside into `PeerLost` with the reason of the abort."""
        try:
            yield
        except Exception as error:
            if self.lost is None:
                raise
            raise PeerLost(self.lost) from error

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise PeerLost(self.lost)

    def _forget_arrived(self) -> None:
        try:
            while self._awaited and self._awaited[0][0].query():
                self._awaited.popleft()
        except RuntimeError:
            # This GPU failed. The thread that uses it gets the error, too. The heartbeat thread must live on.
            self._awaited.clear()

    # ------------------------------------------------------------ small messages (JSON, never pickle)

    def broadcast_json(self, value: Any, group: dist.ProcessGroup | None = None, source: int = 0) -> Any:
        """The `value` of global rank `source`, on every rank of `group` (default: all ranks). Raises `PeerLost`."""
        group = group or self.control
        self._raise_if_lost()
        with peer_errors("waiting for a message of another trainer rank"):
            data = json.dumps(value).encode() if self.rank == source else b""
            size = torch.tensor([len(data)])
            dist.broadcast(size, src=source, group=group)
            buffer = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == source:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(buffer, src=source, group=group)
        return value if self.rank == source else json.loads(buffer.numpy().tobytes())

    def gather_json(self, value: Any) -> list[Any] | None:
        """Every rank's value, in the order of ranks, on rank 0, and None on other ranks. Raises `PeerLost`."""
        self._raise_if_lost()
        with peer_errors("collecting messages of the trainer ranks"):
            data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.control)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: data.numel()] = data
            if self.rank != 0:
                dist.gather(padded, dst=0, group=self.control)
                return None
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
            dist.gather(padded, parts, dst=0, group=self.control)
        return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def share_json(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks, on every rank. Raises `PeerLost`."""
        shared: list[Any] = self.broadcast_json(self.gather_json(value))
        return shared

    def all_succeed(self, error: str | None) -> None:
        """A barrier that fails on every rank if any rank passes an error. Raises `RankFailed` with the first one."""
        for rank, other in enumerate(self.share_json(error)):
            if other is not None:
                raise RankFailed(other if self.world_size == 1 else f"{other} (trainer rank {rank})")

    @property
    def models_on_own_ranks(self) -> bool:
        """Whether some model is on only a part of the ranks. The result is the same on every rank."""
        layouts = [*(model.layout for model in self.model.values()), *self.elsewhere.values()]
        return any(world_size(layout) < self.world_size for layout in layouts)

    def first_rank(self, model: str) -> int:
        """The lowest rank that holds a part of the model."""
        layout = self.elsewhere.get(model) or self.of(model).layout
        return next(rank for rank in range(self.world_size) if holds(rank, layout))

    def meet(self) -> None:
        """Wait for ranks that may have much more to do than this one, because models are on different ranks. Raises
        `PeerLost`."""
        with peer_errors("waiting for the ranks of another model"):
            dist.all_reduce(torch.zeros(1), group=self._patient)

    def barrier(self) -> None:
        """Wait for every rank. Raises `PeerLost` after the deadline."""
        with peer_errors("waiting for the other trainer ranks"):
            dist.all_reduce(torch.zeros(1), group=self.control)


def is_crowded(layout: Parallelism) -> bool:
    """Whether the messages of two models with this layout need all streams of torch's pool."""
    return chunks_of(layout) > 2


def _same_places(a: Parallelism, b: Parallelism, world: int) -> bool:
    def places(layout: Parallelism) -> list[Coordinates | None]:
        return [coordinates(rank, layout) if holds(rank, layout) else None for rank in range(world)]

    same = getattr(a, "pipelines", 1) == getattr(b, "pipelines", 1)
    same = same and (chunks_of(a), loops(a), a.cp, a.ep) == (chunks_of(b), loops(b), b.cp, b.ep)
    return same and places(a) == places(b)


class RankFailed(RuntimeError):
    """Some rank could not do its part of a joint operation. All ranks raise this, with that rank's message."""


def send(tensor: Tensor, peer: int, group: Any, staged: bool) -> None:
    """Call `dist.send`. With `staged` the tensor travels through host memory. NCCL refuses ranks that share a GPU, and
    Gloo sends and receives only host memory."""
    dist.send(tensor.cpu() if staged else tensor, dst=peer, group=group)


def receive(tensor: Tensor, peer: int, group: Any, staged: bool) -> None:
    """Call `dist.recv`. With `staged` the tensor travels through host memory."""
    target = on_host(tensor) if staged else tensor
    dist.recv(target, src=peer, group=group)
    if staged:
        tensor.copy_(target)


def on_host(tensor: Tensor) -> Tensor:
    """An empty tensor in host memory, page-locked for a tensor on a GPU, with the shape and dtype of `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
