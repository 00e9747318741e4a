"""What kopf hears reaches the controller: in order, from kopf's thread, and without kopf's own bookkeeping."""

import asyncio
import threading

from dovetail.operator.handlers import _Feed, make_settings
from dovetail.operator.stateless import NoMemories


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
    given = [(number, number % 7 == 0) for number in range(2000)]

    async def check():
        feed = _Feed(controller, asyncio.get_running_loop())
        thread = threading.Thread(target=lambda: [feed.give(*event) for event in given])
        thread.start()
        async with asyncio.timeout(60):
            while len(controller.seen) < len(given):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        thread.join()

    asyncio.run(check())
    assert controller.seen == given


def test_kopf_copies_no_objects():
    class Untouchable(dict):
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    persistence = make_settings().persistence
    body = Untouchable(spec={})
    assert persistence.diffbase_storage.fetch(body=body) is None
    essence = persistence.diffbase_storage.build(body=body, extra_fields=None)
    assert persistence.progress_storage.clear(essence=essence) == essence


def test_kopf_remembers_no_objects():
    async def check():
        memories = NoMemories()
        first = await memories.recall({"metadata": {"uid": "a"}}, noticed_by_listing=True)
        assert first.noticed_by_listing
        assert list(memories.iter_all_memories()) == []

    asyncio.run(check())
