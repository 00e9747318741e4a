"""Decides which server draws which open iteration, if several are open (`ppo.lag`). It does no I/O.

A server draws one iteration at a time. The oldest open iteration comes first, because the trainers wait for it. It
keeps as many servers as its unfinished samples need, at the load per server with which an iteration begins. The other
servers go to the next iterations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Left:
    """The rest of an open iteration. `version` is the version of the weights that draw it, and `total` is its number of
    samples. `waiting` says how many unfinished samples wait for a server, and `on` how many each server has."""

    iteration: int
    version: int
    total: int
    waiting: int
    on: Mapping[str, int]

    @property
    def count(self) -> int:
        """The number of unfinished samples."""
        return self.waiting + sum(self.on.values())


class Allotment:
    """The current division of servers between open iterations. `capacity` is the maximum number of samples on one
    server. `gather` says whether samples may move, so that the tail of an iteration gathers on few servers. Otherwise a
    server leaves an iteration only when it has none of its samples left."""

    def __init__(self, capacity: int, gather: bool) -> None:
        self._capacity, self._gather = capacity, gather
        self._of: dict[str, int] = {}

    def of(self, server: str) -> int | None:
        """The iteration that a server draws, or will draw once it has the weights. None if no iteration needs it, or if
        it cannot work."""
        return self._of.get(server)

    def settle(self, open_: Sequence[Left], servers: Mapping[str, int | None], fixed: Collection[str] = ()) -> None:
        """Decide again. `servers` has the servers that can work once they have the right weights, with the version that
        each holds. Those in `fixed` can work only with the weights that they hold, because a transfer to them failed.

        The result depends on the arguments and on the last decision, not on time. The oldest iteration with unfinished
        samples always has a server, if any server can work for it."""
        work = sorted((left for left in open_ if left.count), key=lambda left: left.iteration)
        by_number = {left.iteration: left for left in work}

        def fits(server: str, left: Left) -> bool:
            return server not in fixed or servers[server] == left.version

        self._of = {
            s: number
            for s, number in self._of.items()
            if s in servers and number in by_number and fits(s, by_number[number])
        }
        for left in work[:-1]:
            self._release(left, self._need(left, len(servers)))
        for left in work:
            need, mine = self._need(left, len(servers)), self._servers(left)
            able = [s for s in servers if fits(s, left)]
            free = sorted((s for s in able if s not in self._of), key=lambda s: (servers[s] != left.version, s))
            taken = free[: max(0, need - len(mine))]
            if not mine and not taken:
                taken = self._take_back(left, by_number, {s: servers[s] for s in able})[:need]
            self._of |= dict.fromkeys(taken, left.iteration)
        # A server that no iteration needs helps one whose weights it already holds. If there is none, it waits for the
        # next iteration.
        for left in work:
            self._of |= {s: left.iteration for s in servers if s not in self._of and servers[s] == left.version}

    def _need(self, left: Left, servers: int) -> int:
        """The number of servers that an iteration needs for its remaining samples, if each server takes as many as at
        the beginning of an iteration."""
        share = min(self._capacity, -(-left.total // max(1, servers)))
        return min(servers, -(-left.count // max(1, share)))

    def _servers(self, left: Left) -> list[str]:
        return sorted(s for s, number in self._of.items() if number == left.iteration)

    def _release(self, left: Left, need: int) -> None:
        """Take servers from an iteration for the next ones. These are servers without its samples. Once it needs only
        half of its servers, these are all servers that it does not need."""
        if left.waiting:
            return
        mine = self._servers(left)
        idle = [s for s in mine if not left.on.get(s)]
        spare = idle[: max(0, len(mine) - need)]
        mine = [s for s in mine if s not in spare]
        if self._gather and 2 * need <= len(mine):
            spare += sorted(mine, key=lambda s: (-left.on.get(s, 0), s))[need:]
        for server in spare:
            del self._of[server]

    def _take_back(self, left: Left, work: Mapping[int, Left], servers: Mapping[str, int | None]) -> list[str]:
        """The servers that an iteration without a server may take from younger ones, best first. The servers of the
        youngest iteration come first. Among these, servers with the right weights come first, then those with the
        fewest samples."""
        return sorted(
            (s for s in servers if self._of.get(s, 0) > left.iteration),
            key=lambda s: (-self._of[s], servers[s] != left.version, work[self._of[s]].on.get(s, 0), s),
        )
