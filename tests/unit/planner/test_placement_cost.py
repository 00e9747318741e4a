"""The placement with the lowest price of a sample."""

import pytest
from test_placement_cli import CLUSTER, call
from test_placement_job import A10, A100, spec

from dovetail.gpus.inventory import read
from dovetail.planner.placements import Unknown, cheapest, recommend


def pools(**changes):
    """GPUs that stay, and cheaper ones beside them."""
    spot = {"name": "spot", "product": A10, "nodes": 2, "gpusPerNode": 1, "pricePerGPUHour": 0.5} | changes
    stays = {"name": "stays", "product": A100, "nodes": 2, "gpusPerNode": 2, "pricePerGPUHour": 4}
    return read({"pools": [stays, spot]})


def price(chosen):
    return 1 / chosen.prediction.samples_per_dollar


def used(chosen):
    return {task.group for task in chosen.prediction.tasks}


@pytest.fixture(scope="module")
def found():
    return cheapest(spec(), {}, pools())


@pytest.mark.slow
def test_it_costs_no_more_than_the_fastest(found):
    fastest = recommend(spec(), {}, pools())
    assert price(found) <= price(fastest)
    assert found.prediction.iteration_seconds >= fastest.prediction.iteration_seconds


@pytest.mark.nightly
@pytest.mark.slow
def test_a_pool_that_is_too_dear_is_left_alone(found):
    dear = cheapest(spec(), {}, pools(pricePerGPUHour=400))
    assert used(dear) == {"stays"}
    assert price(dear) >= price(found)


@pytest.mark.nightly
@pytest.mark.slow
def test_short_lives_are_paid_for_until_others_are_cheaper(found):
    short = cheapest(spec(), {}, pools(meanLifetimeHours=1))
    assert price(short) > price(found)
    assert short.prediction.lost_share > 0
    shorter = cheapest(spec(), {}, pools(meanLifetimeHours=0.005))
    assert used(shorter) == {"stays"}
    assert shorter.prediction.lost_share == 0


def test_prices_must_be_known():
    there = read({"pools": [{"name": "a100", "product": A100}]})
    with pytest.raises(Unknown, match="pool a100 of the inventory has no pricePerGPUHour"):
        cheapest(spec(), {}, there)


def test_the_command_optimizes_cost(tmp_path):
    refused = call(CLUSTER, "--optimize", "cost")
    assert refused.exit_code == 2
    assert "give an --inventory with pricePerGPUHour" in refused.output
    gpus = tmp_path / "gpus.yaml"
    gpus.write_text(f"pools: [{{product: {A100}, gpusPerNode: 2, pricePerGPUHour: 2, meanLifetimeHours: 3}}]")
    result = call(CLUSTER, "--inventory", gpus, "--optimize", "cost")
    assert result.exit_code == 0, result.output
    assert "Price of 1,000 samples: " in result.output
    assert "of it for GPUs that come and go" in result.output
