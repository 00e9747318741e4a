"""DPO, IPO and KTO: the losses against their papers' formulas, written down plainly for one pair after another."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.manifest.training_types import DPO
from dovetail.trainer.algorithms.losses import kl_estimate, labelled_loss, preference_loss

TRL: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "trl-preferences.json").read_text())


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(policy: list[list[float]], reference: list[list[float]], config: DPO, kl: float) -> float:
    """policy, reference: log-probabilities of (chosen, rejected) of each pair."""
    losses = []
    for (chosen, rejected), (ref_chosen, ref_rejected) in zip(policy, reference, strict=True):
        h = config.beta * math.log((math.exp(chosen) / math.exp(rejected)) / (math.exp(ref_chosen - ref_rejected)))
        if config.loss == "DPO":
            e = config.label_smoothing
            losses.append(-(1 - e) * math.log(sigmoid(h)) - e * math.log(sigmoid(-h)))
        elif config.loss == "IPO":
            losses.append((h / config.beta - 1 / (2 * config.beta)) ** 2)
        else:
            good, bad = chosen - ref_chosen, rejected - ref_rejected
            losses.append(config.desirable_weight * (1 - sigmoid(config.beta * (good - kl))))
            losses.append(config.undesirable_weight * (1 - sigmoid(config.beta * (kl - bad))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "config",
    [
        DPO(beta=0.3),
        DPO(beta=0.3, label_smoothing=0.2),
        DPO(loss="IPO", beta=0.3),
        DPO(loss="KTO", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7),
    ],
    ids=["dpo", "conservative", "ipo", "kto"],
)
def test_losses_are_those_of_the_papers_however_the_batch_is_cut(config: DPO) -> None:
    made = torch.Generator().manual_seed(0)
    policy, reference = -5 * torch.rand(2, 6, 2, generator=made, dtype=torch.float64)
    expected = by_hand(policy.tolist(), reference.tolist(), config, kl=0.4)
    chosen, rejected = (policy - reference).unbind(1)
    one = torch.ones(6)
    whole, stats = preference_loss(chosen, rejected, config, normaliser=6, kl=0.4, tokens=(one, one))
    assert float(whole) == pytest.approx(expected, abs=1e-12)
    shares = [
        preference_loss(chosen[a:b], rejected[a:b], config, normaliser=6, kl=0.4, tokens=(one[a:b], one[a:b]))[0]
        for a, b in ((0, 1), (1, 4), (4, 6))
    ]
    assert float(sum(shares)) == pytest.approx(expected, abs=1e-12)
    assert float(stats["correct"]) == int((chosen > rejected).sum())
    assert float(stats["margin"]) == pytest.approx(float(stats["chosen"] - stats["rejected"]), abs=1e-5)
    assert float(stats["chosen"]) == pytest.approx(config.beta * float(chosen.sum()), abs=1e-5)
    pair = torch.stack([chosen, rejected]).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: preference_loss(x[0], x[1], config, normaliser=6, kl=0.4, tokens=(one, one))[0], pair
    )


def given(name: str) -> torch.Tensor:
    """Log-probabilities that TRL was given, policy less reference."""
    values = [torch.tensor(TRL["given"][each], dtype=torch.float64) for each in (name, f"ref_{name}")]
    return values[0] - values[1]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("dpo", DPO()),
        ("conservative", DPO(beta=0.3, label_smoothing=0.2)),
        ("ipo", DPO(loss="IPO")),
        ("kto", DPO(loss="KTO")),
    ],
)
def test_losses_of_pairs_are_trls(name: str, config: DPO) -> None:
    """tests/golden/make_trl_preferences.py ran TRL's own code."""
    chosen, rejected = (given(side).requires_grad_() for side in ("chosen", "rejected"))
    kl = kl_estimate(given("kl"))
    tokens = torch.tensor(TRL["given"]["chosen_tokens"]), torch.tensor(TRL["given"]["rejected_tokens"])
    loss, stats = preference_loss(chosen, rejected, config, normaliser=len(chosen), kl=kl, tokens=tokens)
    known = TRL[name]
    assert kl == pytest.approx(known.get("kl", kl), abs=1e-9)
    assert float(loss) == pytest.approx(known["loss"], abs=1e-6)
    # The file is of a release of TRL that gave IPO's loss means over tokens, and so had rewards and gradients of means.
    # Today's release takes the means in the loss alone, so that rewards are sums for every loss.
    counts = tokens if config.loss == "IPO" else (torch.ones(len(chosen)), torch.ones(len(chosen)))
    for found, wanted, of in zip(
        torch.autograd.grad(loss, [chosen, rejected]), known["gradients"], counts, strict=True
    ):
        assert (found * of).tolist() == pytest.approx(wanted, abs=1e-6)
    for side, rewards, of in zip(("chosen", "rejected"), known["rewards"], counts, strict=True):
        assert float(stats[side]) == pytest.approx(float((torch.tensor(rewards) * of).sum()), abs=1e-4)


def test_the_loss_of_labels_is_trls() -> None:
    known = TRL["labelled"]
    rows = known["rejected_rows"]
    config = DPO(loss="KTO", beta=0.3, desirable_weight=1.2, undesirable_weight=0.8)
    ratios = torch.cat([given("chosen"), given("rejected")[rows]]).requires_grad_()
    good = torch.arange(len(ratios)) < len(ratios) - len(rows)
    loss, _ = labelled_loss(ratios, good, config, normaliser=len(ratios), kl=kl_estimate(given("kl")))
    assert float(loss) == pytest.approx(known["loss"], abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, ratios)
    assert gradient.tolist() == pytest.approx([x for side in known["gradients"] for x in side], abs=1e-6)


def test_labels_give_the_loss_of_pairs_and_need_none() -> None:
    config = DPO(loss="KTO", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    ratios = torch.randn(8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    pairs, _ = preference_loss(ratios[:4], ratios[4:], config, normaliser=4, kl=0.2)
    good = torch.arange(8) < 4
    labels, stats = labelled_loss(ratios, good, config, normaliser=8, kl=0.2)
    assert float(labels) == pytest.approx(float(pairs), abs=1e-12)
    assert float(stats["correct"]) == int((ratios[:4] > 0.2).sum() + (ratios[4:] < 0.2).sum())
    assert float(stats["chosen"]) == pytest.approx(0.3 * float(ratios[:4].sum()), abs=1e-6)
    assert (float(stats["good"]), float(stats["responses"])) == (4, 8)
    uneven = good.clone()
    uneven[1:4] = False
    wanted = [
        1.3 * (1 - sigmoid(0.3 * (r - 0.2))) if g else 0.7 * (1 - sigmoid(0.3 * (0.2 - r)))
        for r, g in zip(ratios.tolist(), uneven.tolist(), strict=True)
    ]
    parts = [labelled_loss(ratios[a:b], uneven[a:b], config, normaliser=8, kl=0.2)[0] for a, b in ((0, 3), (3, 8))]
    assert float(sum(parts)) == pytest.approx(sum(wanted) / 8, abs=1e-12)


def test_at_the_start_the_losses_are_the_known_constants() -> None:
    same, counts = torch.zeros(3), (torch.ones(3), torch.ones(3))
    at_start = {
        loss: float(preference_loss(same, same, DPO(loss=loss), normaliser=3, tokens=counts)[0])
        for loss in ("DPO", "IPO", "KTO")
    }
    assert at_start == pytest.approx({"DPO": math.log(2), "IPO": 25.0, "KTO": 0.5})


def test_large_log_ratios_stay_finite() -> None:
    far = torch.tensor([1e4])
    assert float(preference_loss(-far, far, DPO(), normaliser=1)[0]) == pytest.approx(2e3)
    assert float(preference_loss(far, -far, DPO(), normaliser=1)[0]) == 0.0


def test_the_kl_estimate_is_a_mean_and_never_negative() -> None:
    assert kl_estimate(torch.tensor([1.0, -0.5, 1.0])) == pytest.approx(0.5)
    assert kl_estimate(torch.tensor([1.0, -3.0])) == 0.0
