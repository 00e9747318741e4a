"""Weights of a vLLM server that CUDA graphs read."""

import pytest
import torch

from dovetail.models.links.deadline import TransferError
from dovetail.rollout.weight_receiver import FixedPlaces


def tied() -> torch.nn.Module:
    model = torch.nn.Module()
    model.embedding, model.norm, model.head = torch.nn.Embedding(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 5)
    model.head.weight = model.embedding.weight
    return model


def test_weights_that_are_written_over_are_where_they_were() -> None:
    model = tied()
    places = FixedPlaces(model)
    with torch.no_grad():
        model.embedding.weight.fill_(7.0)
        model.norm.running_mean.fill_(7.0)
    places.check(model)


@pytest.mark.parametrize("name", ["head.weight", "norm.bias", "norm.running_mean"])
def test_a_tensor_that_is_elsewhere_is_named(name: str) -> None:
    model = tied()
    places = FixedPlaces(model)
    module, _, tensor = name.rpartition(".")
    owner = model.get_submodule(module)
    old = getattr(owner, tensor)
    setattr(owner, tensor, type(old)(old.detach().clone()))
    with pytest.raises(TransferError, match=f"^1 tensors of the model are no longer .* such as {name};"):
        places.check(model)
