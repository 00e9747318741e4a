"""Advantage functions: the same from a manifest and in a loop of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.manifest.callables import FunctionError
from dovetail.manifest.training_types import PPO
from dovetail.manifest.types import Stage
from dovetail.protocol.experience import Experience, advantages_of
from dovetail.protocol.wire import pack, unpack
from dovetail.trainer.algorithms import advantages as adv
from dovetail.trainer.algorithms.kl import kl_estimate
from dovetail.trainer.functions import load_advantages, rehearse_advantages
from helpers.local_trainer import LocalTrainer
from helpers.patience import PATIENCE
from helpers.trainer_ranks import job, load_command, ppo_batch

MINE = """
import threading
import time


def centred(experience):
    sums = experience.rewards[:, ::-1].cumsum(axis=1)[:, ::-1]
    return (sums - sums[experience.mask].mean()) * experience.per_token(experience.groups % 2 + 1)


def flat(experience):
    return experience.scores


def text(experience):
    return [["a"]]


def endless(experience):
    return experience.rewards / 0.0, None


def broken(experience):
    return experience.no_such_field


def polls(experience):
    while True:
        time.sleep(0.01)


def waits(experience):
    threading.Semaphore(0).acquire()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a module `my_advantages`, which is not the working directory; there is another one there."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_advantages.py").write_text(MINE)
    (tmp_path / "my_advantages.py").write_text("raise RuntimeError('found in the working directory')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_advantages", raising=False)
    return str(tmp_path / "code")


def experience(config: PPO, **arrays: Any) -> Experience:
    return Experience(1, [], [], {**unpack(ppo_batch(1)), **arrays}, config=config, kl_coef=0.05)


def step(ppo: dict[str, Any], batch: bytes) -> dict[str, float]:
    """Metrics of one PPO step."""
    with LocalTrainer(job(ppo={"oldLogProbs": "Rollout", "epochs": 1, **ppo})) as trainer:
        trainer.metrics(load_command(Stage.PPO))
        found = trainer.metrics(trainer.step(Stage.PPO, 1, batch, ["actor", "critic"], 4, kl_coef=0.05))
    skipped = ("seconds", "activation_peak_bytes", "reward_with_kl")
    return {name: value for name, value in found.items() if name not in skipped}


@pytest.mark.slow
def test_a_manifest_and_a_loop_of_ones_own_train_the_same(folder: str) -> None:
    named = {"advantageFunction": "my_advantages:centred", "importPath": folder}
    by_manifest = step(named, ppo_batch(1))
    config = PPO(advantage_function="my_advantages:centred", import_path=folder, reward_clip=None)
    seen = experience(config)
    function = load_advantages(config)
    assert function is not None
    seen.set_advantages(*function(seen))
    assert step({"rewardClip": None}, pack(seen.arrays)) == step({**named, "rewardClip": None}, ppo_batch(1))
    assert by_manifest["actor_grad_norm"] > 0


@pytest.mark.slow
def test_the_trainers_add_the_values_where_a_loop_of_ones_own_gave_no_returns() -> None:
    seen = experience(PPO())
    values = seen.values
    assert values is not None
    seen.set_advantages(seen.rewards)
    without = step({}, pack(seen.arrays))
    seen.set_advantages(seen.rewards, seen.rewards + values)
    assert step({}, pack(seen.arrays)) == without


@pytest.mark.parametrize(
    "ppo",
    [
        PPO(reward_clip=0.5, missing_eos_penalty=0.7),
        PPO(reward_clip=None),
        PPO.model_validate({"kl": {"in": "Loss"}, "missingEosPenalty": 1.0}),
        PPO(whiten_rewards=True),
    ],
)
def test_rewards_are_those_of_the_built_in_estimators(ppo: PPO) -> None:
    seen = experience(ppo)
    t = {name: torch.from_numpy(seen.arrays[name]) for name in ("scores", "groups", "finished", "values")}
    logprobs, reference = (torch.from_numpy(seen.arrays[n]) for n in ("rollout_logprobs", "ref_logprobs"))
    mask = torch.from_numpy(seen.mask)
    built_in = adv.compute_advantages(ppo, logprobs=logprobs, ref_logprobs=reference, mask=mask, kl_coef=0.05, **t)
    if ppo.whiten_rewards:
        np.testing.assert_allclose(seen.rewards, built_in.rewards.numpy(), rtol=1e-6, atol=1e-6)
    else:
        assert np.array_equal(seen.rewards, built_in.rewards.numpy())
    assert np.array_equal(seen.token_kl, kl_estimate(logprobs, reference, mask).numpy())


def test_returns_are_advantages_and_values_unless_given() -> None:
    seen = experience(PPO())
    assert seen.values is not None
    advantages, returns = advantages_of(lambda e: e.per_token(e.scores), seen, "mine")
    assert returns is not None
    assert np.array_equal(returns, np.where(seen.mask, advantages + seen.values, 0))
    assert not advantages[~seen.mask].any()
    given = advantages_of(lambda e: (e.rewards, e.rewards), seen, "mine")[1]
    assert given is not None
    assert np.array_equal(given, seen.rewards)
    del seen.arrays["values"]
    assert advantages_of(lambda e: e.rewards, seen, "mine")[1] is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module_here:f", "cannot import"),
        ("my_advantages:flat", r"returned advantages of shape \(2,\); return one number a token, \(2, 3\)"),
        ("my_advantages:text", "returned advantages as list; return an array"),
        ("my_advantages:endless", "returned advantages that are not finite"),
        (
            "my_advantages:polls",
            r"did not return within 1 s \(spec.ppo.timeoutSeconds\) at .*my_advantages.py:\d+ in polls",
        ),
        ("my_advantages:waits", "did not return within 1 s"),
        ("never_imported:f", "did not return within 1 s"),
        ("my_advantages:broken", r"raised AttributeError: .*no_such_field.* at .*my_advantages.py:\d+ in broken"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_is_wrong_shows_before_anything_is_trained(folder: str, function: str, message: str) -> None:
    late = function in ("my_advantages:polls", "my_advantages:waits", "never_imported:f")
    config = PPO(advantage_function=function, import_path=folder, timeout_seconds=1.0 if late else 600.0)
    (Path(folder) / "never_imported.py").write_text("import threading\n\nthreading.Semaphore(0).acquire()\n")
    with pytest.raises(ValueError, match=f"^spec.ppo.advantageFunction: .*{message}"):
        rehearse_advantages(config)


def test_a_function_that_waits_within_its_limit_is_no_frozen_rank(folder: str) -> None:
    (Path(folder) / "patient.py").write_text(
        "from dovetail.protocol.process.pulse import PROGRESS\n\n\ndef f(e):\n"
        "    assert PROGRESS.excused\n    return e.rewards\n"
    )
    rehearse_advantages(PPO(advantage_function="patient:f", import_path=folder))


def test_a_function_may_have_alarms_of_its_own(folder: str) -> None:
    (Path(folder) / "alarmed.py").write_text(
        "import signal\nimport time\n\nrang = []\n\n\ndef f(e):\n"
        "    signal.signal(signal.SIGALRM, lambda *_: rang.append(1))\n    signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "    while not rang:\n        time.sleep(0.01)\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n    time.sleep(600)\n"
    )
    config = PPO(advantage_function="alarmed:f", import_path=folder, timeout_seconds=1.0)
    with pytest.raises(ValueError, match=r"did not return within 1 s .* at .*alarmed.py:\d+ in f"):
        rehearse_advantages(config)


def test_a_function_that_cannot_be_interrupted_ends_its_process_with_the_sentence(folder: str) -> None:
    (Path(folder) / "stubborn.py").write_text(
        "import time\n\n\ndef f(e):\n    while True:\n        try:\n            time.sleep(60)\n"
        "        except BaseException:\n            pass\n"
    )
    program = (
        "import sys\nfrom dovetail.manifest import callables\nfrom dovetail.manifest.callables import *\n"
        "callables.INTERRUPTED_SECONDS = 0.2\nwith time_limit(0.2, 'spec.ppo.loss', 'stubborn:f'):\n"
        "    load_callable('stubborn:f', 'spec.ppo.loss', sys.argv[1])(None)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("spec.ppo.loss: stubborn:f did not return within 0.2 s (spec.ppo.timeoutSeconds)")


def test_a_function_that_fails_later_is_a_commands_error(folder: str) -> None:
    (Path(folder) / "my_advantages.py").write_text(
        "def late(e):\n    assert len(e.scores) == 2, 'too many'\n    return e.rewards\n"
    )
    ppo = {"advantageFunction": "my_advantages:late", "importPath": folder}
    rehearse_advantages(PPO.model_validate(ppo))
    with LocalTrainer(job(ppo=ppo)) as trainer:
        trainer.metrics(load_command(Stage.PPO))
        result = trainer.execute(trainer.step(Stage.PPO, 1, ppo_batch(1), ["actor", "critic"], 4))
    assert str(result.error).startswith(
        "spec.ppo.advantageFunction: my_advantages:late raised AssertionError: too many"
    )
    assert issubclass(FunctionError, ValueError)
