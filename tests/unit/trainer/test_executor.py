"""The executor's checks, and the optimizer against torch's own."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dovetail.manifest.training_types import Optimizer
from dovetail.protocol.messages import Action
from dovetail.trainer.communication.groups import PeerLost, peer_errors
from dovetail.trainer.engine.executor import check_actions
from dovetail.trainer.engine.optim import AdamW, learning_rate
from dovetail.trainer.files.storage import storage_sentence


def actions(text: str) -> list[Action]:
    """`aF0 cB1`: model, kind, micro-batch."""
    return [Action(model=word[0], kind=word[1], micro_batch=int(word[2:])) for word in text.split()]


@settings(deadline=None)
@given(st.data())
def test_any_interleaving_of_ascending_models_is_accepted(data: st.DataObject) -> None:
    queues = {m: actions(f"{m}F0 {m}F1 {m}B0 {m}F2 {m}B1 {m}B2") for m in "ac"}
    merged = []
    while any(queues.values()):
        model = data.draw(st.sampled_from([m for m in queues if queues[m]]))
        merged.append(queues[model].pop(0))
    check_actions(merged, {"a": 3, "c": 3}, training=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("aF0 aB0", "1 F of a, there are 2 micro-batches"),
        ("aF1 aF0 aB0 aB1", "where 0 is next"),
        ("aF0 aF1 aB1 aB0", "ascending order"),
        ("aF0 aB0 aB1 aF1", "before its F"),
        ("aF0 aF1 aB0 aB1 bF0", "model 'b', which has no work"),
        ("aF0 aF1 aB0", "1 B of a"),
        ("aF0 aW0 aI0 aF1 aB1", "W of a micro-batch 0 before its I"),
        ("aI0 aF0 aW0 aF1 aB1", "I of a micro-batch 0 before its F"),
        ("aF0 aF1 aI0 aB1 aW0", "where 0 is next"),
        ("aF0 aF1 aI0 aI1 aW0", "1 B of a"),
    ],
)
def test_impossible_schedules_are_named(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_actions(actions(text), {"a": 2}, training=True)


def test_a_split_backward_and_several_mini_batches_are_accepted() -> None:
    check_actions(actions("aF0 aF1 aI0 aI1 aW0 aW1"), {"a": 2}, training=True)
    check_actions(actions("aF0 aB0 aF1 aI1 aW1"), {"a": 2}, training=True, mini_batches=2)
    check_actions(actions("aF0 aF1 aB0 bF0 aB1 aF2 bB0 aB2 aF3 bF1 aB3 bB1"), {"a": 4, "b": 2}, True, mini_batches=2)
    with pytest.raises(ValueError, match="F of a micro-batch 1 before the optimizer step of the mini-batch before it"):
        check_actions(actions("aF0 aI0 aF1 aW0 aB1"), {"a": 2}, training=True, mini_batches=2)


@pytest.mark.parametrize("schedule", ["Constant", "Linear", "Cosine"])
def test_learning_rate_schedule(schedule: str) -> None:
    config = Optimizer(learning_rate=2.0, warmup_fraction=0.1, schedule=schedule)
    rates = [learning_rate(step, 100, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    end = {"Constant": 2.0, "Linear": 0.0, "Cosine": 0.0}[schedule]
    middle = {"Constant": 2.0, "Linear": 1.0, "Cosine": 1.0}[schedule]
    assert rates[55] == pytest.approx(middle)
    assert rates[100] == pytest.approx(end)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_adamw_equals_torch_with_decay_on_matrices_only() -> None:
    config = Optimizer(learning_rate=0.1, weight_decay=0.2, schedule="Constant", warmup_fraction=0.0)
    ours, theirs = nn.Linear(5, 7), nn.Linear(5, 7)
    theirs.load_state_dict(ours.state_dict())
    mine = AdamW(dict(ours.named_parameters()), config, 10)
    groups = [
        {"params": [theirs.weight], "weight_decay": 0.2},
        {"params": [theirs.bias], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(config.beta1, config.beta2), eps=config.eps)
    for step in range(4):
        inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
        for model in (ours, theirs):
            model(inputs).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        assert float(mine.squared_norm()) ** 0.5 == pytest.approx(float(norm), rel=1e-6)
        reference.step()
        reference.zero_grad()
        mine.step(min(1.0, 1.0 / float(norm)))
        assert ours.weight.grad is None
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_only_transport_errors_become_lost_peers() -> None:
    with pytest.raises(PeerLost, match=r"^sending: Connection closed by peer \[127\.0\.0\.1\]:5$"):  # noqa: SIM117
        with peer_errors("sending"):
            raise RuntimeError(
                "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5. This is typically caused"
            )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # noqa: SIM117
        with peer_errors("sending"):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied, storage of size 3")


def test_a_full_disk_is_named_even_inside_other_errors() -> None:
    outer = RuntimeError("writer failed")
    outer.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    sentence = storage_sentence(Path("run/checkpoints/ppo-3"), outer)
    assert sentence == "run/checkpoints/ppo-3 could not be written: no space left on device; free some space there"
