"""Write tests/golden/trl-preferences.json anew: losses, rewards and gradients of DPO, IPO and KTO by TRL's own code.

It runs in an environment of its own:

    uv venv /tmp/trl
    uv pip install --python /tmp/trl/bin/python trl==0.19.1 transformers==4.53.3 torch numpy
    /tmp/trl/bin/python tests/golden/make_trl_preferences.py

Inputs are log-probabilities of responses, summed over their tokens, and the numbers of these tokens. For IPO TRL's
`concatenated_forward` divides the sums by the numbers first; so does this script.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import DPOTrainer, KTOTrainer
from trl.trainer.dpo_config import FDivergenceType

PAIRS = 6
NAMES = ("chosen", "rejected", "ref_chosen", "ref_rejected")


def drawn() -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(3, 30, (2, PAIRS), generator=generator)
    reference = -tokens * (1 + torch.rand(2, PAIRS, generator=generator, dtype=torch.float64))
    policy = reference + 4 * torch.randn(2, PAIRS, generator=generator, dtype=torch.float64)
    kl = torch.randn(2, 2 * PAIRS, generator=generator, dtype=torch.float64)
    made = dict(zip(NAMES, (*policy, *reference), strict=True))
    made |= {"chosen_tokens": tokens[0], "rejected_tokens": tokens[1], "kl": kl[0] - 20, "ref_kl": kl[1] - 20.5}
    return {name: [round(x, 6) for x in value.tolist()] for name, value in made.items()}


def told(losses: torch.Tensor, at: list[torch.Tensor], rewards: list[torch.Tensor]) -> dict[str, Any]:
    loss = losses.mean()
    gradients = torch.autograd.grad(loss, at)
    return {
        "loss": loss.item(),
        "gradients": [gradient.tolist() for gradient in gradients],
        "rewards": [reward.tolist() for reward in rewards],
    }


def dpo(given: dict[str, list[float]], loss: str, beta: float, smoothing: float) -> dict[str, Any]:
    tensors = {name: torch.tensor(given[name], dtype=torch.float64) for name in NAMES}
    if loss == "ipo":
        for name in NAMES:
            tensors[name] /= torch.tensor(given[f"{name.removeprefix('ref_')}_tokens"])
    at = [tensors["chosen"].requires_grad_(), tensors["rejected"].requires_grad_()]
    this = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        beta=beta,
        label_smoothing=smoothing,
        reference_free=False,
        f_divergence_type=FDivergenceType.REVERSE_KL.value,
        f_divergence_params={},
        loss_type=loss,
    )
    losses, *rewards = DPOTrainer.dpo_loss(this, *(tensors[name] for name in NAMES))
    return told(losses, at, rewards)


def kto(
    given: dict[str, list[float]], rows: list[int], beta: float, desirable: float, undesirable: float
) -> dict[str, Any]:
    """`rows`: of the rejected responses, those that are given as well."""
    tensors = {name: torch.tensor(given[name], dtype=torch.float64) for name in (*NAMES, "kl", "ref_kl")}
    at = [tensors["chosen"].requires_grad_(), tensors["rejected"][rows].requires_grad_()]
    this = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
        beta=beta,
        calculate_KL=True,
        loss_type="kto",
        desirable_weight=desirable,
        undesirable_weight=undesirable,
    )
    losses, *rewards, kl = KTOTrainer.kto_loss(
        this, at[0], at[1], tensors["kl"], tensors["ref_chosen"], tensors["ref_rejected"][rows], tensors["ref_kl"]
    )
    return told(losses, at, rewards) | {"kl": kl.item(), "rejected_rows": rows}


def main() -> None:
    given = drawn()
    every = list(range(PAIRS))
    found = {
        "trl": trl.__version__,
        "given": given,
        "dpo": dpo(given, "sigmoid", 0.1, 0.0),
        "conservative": dpo(given, "sigmoid", 0.3, 0.2),
        "ipo": dpo(given, "ipo", 0.1, 0.0),
        "kto": kto(given, every, 0.1, 1.0, 1.0),
        "labelled": kto(given, every[:2], 0.3, 1.2, 0.8),
    }
    path = Path(__file__).with_name("trl-preferences.json")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
