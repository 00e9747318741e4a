"""How the tests are handed to several workers: whole files, and few that start many processes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdist.scheduler import LoadFileScheduling

# Files that run at once and start clusters or whole jobs. Each has five to ten busy processes. With more of them a
# process waits for a core longer than its peers wait for it.
HEAVY = 2


class Lanes(LoadFileScheduling):
    """Hands out files in the order of the tests. `scope_of` names a file's scope, which one worker runs, and `is_heavy`
    says of a scope whether no more than HEAVY like it run at once.

    A worker takes the first scope that it may. A worker that may take none ends, because the others take what is left:
    it would hold back the last test that it was given."""

    def __init__(self, config: Any, log: Any, scope_of: Callable[[str], str], is_heavy: Callable[[str], bool]) -> None:
        super().__init__(config, log)
        self._scope_of, self._is_heavy = scope_of, is_heavy

    def _split_scope(self, nodeid: str) -> str:
        return self._scope_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        heavy = [self._has_heavy(work) for other, work in self.assigned_work.items() if other is not node]
        room = sum(heavy) < HEAVY
        scope = next((each for each in self.workqueue if room or not self._is_heavy(each)), None)
        if scope is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _has_heavy(self, work: dict[str, dict[str, bool]]) -> bool:
        return any(self._is_heavy(scope) and not all(done.values()) for scope, done in work.items())
