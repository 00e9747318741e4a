"""Which server sends a version to one that came late."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dovetail.coordinator.workers.publishing import Target
from dovetail.coordinator.workers.relays import choose_senders, process_of


def server(name: str, **more: Any) -> Target:
    return Target(name, **{"kind": "rollout", "url": "http://x", "incarnation": "1", "sends": True, **more})


A, B, C, D = (server(name) for name in "abcd")


def names(chosen: dict[Target, Target]) -> dict[str, str]:
    return {receiver.name: sender.name for receiver, sender in chosen.items()}


def test_servers_share_the_work() -> None:
    late = [server(f"late-{i}") for i in range(5)]
    assert Counter(names(choose_senders(late, [A, B], {})).values()) == {"a": 3, "b": 2}
    assert names(choose_senders(late[:1], [A, B], {}, Counter(a=1))) == {"late-0": "b"}


def test_nobody_sends_to_itself_or_what_it_keeps_no_copy_of() -> None:
    assert choose_senders([A], [A], {}) == {}
    assert choose_senders([A], [server("b", sends=False)], {}) == {}
    assert choose_senders([server("b", sends=False)], [A], {}) == {}, "it takes turns with trainers"
    assert choose_senders([server("s", kind="scorer")], [A], {}) == {}


def test_a_failed_sender_is_not_asked_twice_unless_it_is_a_new_process() -> None:
    failed = {process_of(D): {process_of(A)}}
    assert names(choose_senders([C, D], [A, B], failed)) == {"c": "b", "d": "b"}
    assert names(choose_senders([D], [A], failed)) == {}
    assert names(choose_senders([D], [server("a", incarnation="2")], failed)) == {"d": "a"}
    assert names(choose_senders([server("d", incarnation="2")], [A], failed)) == {"d": "a"}


def test_after_two_failures_it_is_the_trainers_turn() -> None:
    assert choose_senders([D], [A, B, C], {process_of(D): {process_of(A), process_of(B)}}) == {}


@pytest.mark.parametrize(
    ("holder", "receiver", "sends"),
    [
        ("bfloat16", "bfloat16", True),
        ("bfloat16", "float16", False),
        ("bfloat16", "float32", False),
        ("float16", None, False),  # a quantised server, which the trainers would send float32
        ("float32", "bfloat16", True),
        (None, "float32", True),
    ],
)
def test_receivers_get_the_bits_that_trainers_would_send(holder: str | None, receiver: str | None, sends: bool) -> None:
    assert bool(choose_senders([server("r", dtype=receiver)], [server("h", dtype=holder)], {})) is sends
