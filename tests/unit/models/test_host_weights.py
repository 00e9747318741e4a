"""Weights in host memory that a scorer has on its device for a while, with host memory playing the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.models import build_stage
from dovetail.protocol.messages import ModelRef
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring import host_weights
from dovetail.rollout.scoring.host_weights import HostModels
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from helpers.scorers import FakeCopies, exported, samples


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRef]:
    return exported(tmp_path_factory)


@pytest.fixture
def arrays() -> SamplesToScore:
    return SamplesToScore.read(samples())


def test_scores_are_the_same_wherever_the_weights_wait(folders: dict[str, ModelRef], arrays: SamplesToScore) -> None:
    plain, copies = scoring.ModelScorer(), FakeCopies()
    plain.load(folders)
    expected = plain.score(scoring.MODELS, arrays)
    scorer = scoring.ModelScorer(copies=[copies])
    scorer.load(folders)
    assert not copies.brought, "a server that generates keeps its GPU to itself"
    for prefetched in (True, False):
        if prefetched:
            assert sorted(scorer.bring()) == sorted(folders)
            assert copies.under_way, "bringing must not wait"
        got = scorer.score(scoring.MODELS, arrays)
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])
        scorer.leave()
        assert not copies.there
    assert len(copies.brought) == 2 * len(folders), "once each time"
    assert plain.bring() == list(plain.models), "without another place they are always there"


def test_new_weights_of_the_critic_reach_host_memory_and_the_next_scores(
    folders: dict[str, ModelRef], arrays: SamplesToScore
) -> None:
    scorer = scoring.ModelScorer(copies=[FakeCopies()])
    scorer.load(folders)
    old = scorer.score(["critic"], arrays)["values"]
    new = {name: p.data for name, p in build_stage(folders["reward"]).named_parameters()}
    scorer.apply_weights(scorer.stage_weights(new.items()), 3)
    expected = scoring.ModelScorer()
    expected.load({"critic": folders["reward"].model_copy(update={"head": "value"})})
    values = expected.score(["critic"], arrays)["values"]
    assert np.abs(values - old).max() > 1e-3
    for _ in range(2):
        np.testing.assert_array_equal(scorer.score(["critic"], arrays)["values"], values)
        scorer.leave()


def test_models_make_room_for_each_other_where_not_all_fit(
    folders: dict[str, ModelRef], arrays: SamplesToScore
) -> None:
    plain = scoring.ModelScorer()
    plain.load(folders)
    largest = max(sum(p.nbytes for _, p in plain.require(name).named_parameters()) for name in scoring.MODELS)
    copies = FakeCopies(largest)
    scorer = scoring.ModelScorer(copies=[copies])
    scorer.host = HostModels([copies], margin_bytes=0)
    scorer.load(folders)
    assert len(scorer.bring()) == 1
    expected, got = plain.score(scoring.MODELS, arrays), scorer.score(scoring.MODELS, arrays)
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name])
    assert copies.dropped >= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(folders: dict[str, ModelRef], arrays: SamplesToScore) -> None:
    device = torch.device("cuda")
    plain = scoring.ModelScorer(device)
    plain.load(folders)
    expected = plain.score(scoring.MODELS, arrays)
    scorer = scoring.ModelScorer(device, copies=[host_weights.CudaCopies(device)])
    scorer.load(folders)
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        scorer.bring()
        got = scorer.score(scoring.MODELS, arrays)
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], atol=1e-6)
        scorer.leave()
        assert torch.cuda.memory_allocated() <= before
