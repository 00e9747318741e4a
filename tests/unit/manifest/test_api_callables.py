"""Functions that a manifest names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.manifest.callables import load_callable


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_at_all:f", "PYTHONPATH"),
        ("math:no_such_function", "no_such_function"),
        ("math:pi", "not callable"),
        ("math", "module:callable"),
    ],
)
def test_a_function_that_cannot_be_found_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^spec.ppo.advantageFunction: .*{message}"):
        load_callable(name, "spec.ppo.advantageFunction")


def test_a_function_beside_the_manifest_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_here.py").write_text("def reward(prompts, responses):\n    return [1.0] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    assert load_callable("my_rewards_here:reward", "spec.models.reward.function")(["a"], ["b"]) == [1.0]
