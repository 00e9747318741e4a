"""Decides which server draws which open iteration, if several are open (`ppo.lag`). Pure.

A server draws one iteration at a time. The oldest open iteration comes first, because the trainers wait for it. It
keeps as many servers as its unfinished samples need at the load with which an iteration begins. The others go to the
next iterations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Left:
    """What is left of an open iteration. `version`: the weights that draw it. `total`: its number of samples. Of the
    unfinished ones, `waiting` wait for a server; `on`: the others, by server."""

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
    """`capacity`: the most samples on one server. `gather`: whether samples may move, so that the tail of an iteration
    gathers on few servers; otherwise a server leaves an iteration only when it has none of its samples left."""

    def __init__(self, capacity: int, gather: bool) -> None:
        self._capacity, self._gather = capacity, gather
        self._of: dict[str, int] = {}

    def of(self, server: str) -> int | None:
        """The iteration that a server draws, or will draw once it has its weights. None: no iteration needs it, or it
        cannot work."""
        return self._of.get(server)

    def settle(self, open_: Sequence[Left], servers: Mapping[str, int | None], fixed: Collection[str] = ()) -> None:
        """Decide anew. `servers`: those that can work once they have the right weights, with the version that each
        holds. `fixed`: those among them that can only work with what they hold, because a transfer to them failed.

        The result depends on the arguments and on the decision before, not on time. The oldest iteration with
        unfinished samples always has a server, if there is one that can work for it."""
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
        # One that nobody needs helps where it needs no other weights. Otherwise it waits for the next iteration.
        for left in work:
            self._of |= {s: left.iteration for s in servers if s not in self._of and servers[s] == left.version}

    def _need(self, left: Left, servers: int) -> int:
        """How many servers it needs: so many have room for the remaining samples, if each takes as many as at the
        iteration's beginning."""
        share = min(self._capacity, -(-left.total // max(1, servers)))
        return min(servers, -(-left.count // max(1, share)))

    def _servers(self, left: Left) -> list[str]:
        return sorted(s for s, number in self._of.items() if number == left.iteration)

    def _release(self, left: Left, need: int) -> None:
        """Take from an iteration the servers that the next ones shall have: those without samples of it, and all that
        it does not need once it needs only half of them."""
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
        """Those of `servers` that an iteration takes from younger ones, because it has none: the youngest iteration's
        first, of these the ones that still hold the right weights, then those with the fewest samples."""
        return sorted(
            (s for s in servers if self._of.get(s, 0) > left.iteration),
            key=lambda s: (-self._of[s], servers[s] != left.version, work[self._of[s]].on.get(s, 0), s),
        )
