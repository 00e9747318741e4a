"""On CPUs vLLM gives a token the same bits, whatever other tokens are in the step."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

# Not imported here: each worker of a run imports all test files.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]


@pytest.mark.parametrize(("inner", "outer"), [(64, 300), (512, 64), (1408, 512)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    inner: int, outer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    from dovetail.rollout.compat import fill_rows_on_cpus

    if not current_platform.is_cpu():
        pytest.skip("vLLM is not built for CPUs here")
    monkeypatch.setattr(utils, "cpu_unquantized_gemm", utils.cpu_unquantized_gemm)
    fill_rows_on_cpus()
    fill_rows_on_cpus()
    torch.manual_seed(1)
    layer = torch.nn.Linear(inner, outer, bias=False).requires_grad_(False)
    x = torch.randn(70, inner)
    expected = torch.nn.functional.linear(x, layer.weight)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    product = utils.dispatch_unquantized_gemm()
    whole = product(layer, x, layer.weight)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    for rows in (1, 2, 3, 7, 16, 17, 33):
        found = product(layer, x[:rows], layer.weight)
        assert found.shape == (rows, outer)
        assert torch.equal(found, whole[:rows]), f"{rows} rows"
