"""What kopf hears reaches the controller: in order, from kopf's thread, and without kopf's own bookkeeping."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from kopf._cogs.clients import watching
from kopf._core.reactor import queueing

from dovetail.operator.cluster.kopf_watches import direct_watches
from dovetail.operator.handlers import _Feed, make_settings


class Controller:
    """Is slow, as a queue that others use may be."""

    def __init__(self):
        self.seen = []

    async def observe(self, thing, deleted):
        await asyncio.sleep(0)
        self.seen.append((thing, deleted))
        await asyncio.sleep(0)


def test_events_of_another_thread_come_in_order():
    controller = Controller()
    given = [("Pod", {"number": number}, number % 7 == 0) for number in range(2000)]

    async def check():
        feed = _Feed(controller, asyncio.get_running_loop())
        thread = threading.Thread(target=lambda: [feed.give(*event) for event in given])
        thread.start()
        async with asyncio.timeout(60):
            while len(controller.seen) < len(given):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        thread.join()

    asyncio.run(check())
    assert controller.seen == [({"kind": kind} | thing, deleted) for kind, thing, deleted in given]


def test_watches_bring_objects_to_the_controller_and_end_with_what_they_raise(monkeypatch):
    async def infinite_watch(*, resource, namespace, **_):
        yield {"type": None, "object": {"kind": "?", "metadata": {"name": f"{namespace}-listed"}}}
        yield watching.Bookmark.LISTED
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}
        yield {"type": "DELETED", "object": {"metadata": {"name": "gone"}}}
        raise watching.WatchingError("it broke")

    monkeypatch.setattr(watching, "infinite_watch", infinite_watch)
    heard, kopfs = [], queueing.watcher
    with direct_watches(lambda kind, thing, deleted: heard.append((kind, thing["metadata"]["name"], deleted))):
        watcher = queueing.watcher(
            settings=make_settings(), resource=SimpleNamespace(kind="Pod"), namespace="a", processor=None
        )
        with pytest.raises(watching.WatchingError):
            asyncio.run(watcher)
    assert heard == [("Pod", "a-listed", False), ("Pod", "gone", True)]
    assert queueing.watcher is kopfs
