"""A job whose image has no kernels for a group's GPU is refused when it is validated or planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from dovetail.cli.main import cli
from dovetail.gpus.gpu_products import image_errors
from dovetail.manifest.documents import parse
from dovetail.manifest.types import RLHFJobSpec
from dovetail.operator.operator_settings import OperatorSettings

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart-cluster.yaml"
SENTENCE = (
    "spec.groups[1].image: Tesla-V100-SXM2-32GB has compute capability 7.0, and the operator's image has kernels for "
    "7.5, 8.0, 8.6, 9.0, 10.0 and 12.0; build an image with torch for CUDA 12.6 and --build-arg CAPABILITY=7.0 "
    "(docs/images.md), and name it here."
)


def spec(product: str = "Tesla-V100-SXM2-32GB", image: str | None = None, role: str = "rollout") -> RLHFJobSpec:
    document = yaml.safe_load(EXAMPLE.read_text())
    group = document["spec"]["groups"][1]
    group["gpu"]["product"], group["roles"] = product, [role]
    group.pop("image")
    if image is not None:
        group["image"] = image
    return parse(document).spec


def called(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_the_example_without_its_own_image_is_refused(command: str, tmp_path: Path) -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    assert called(command, str(EXAMPLE)).exit_code == 0
    del document["spec"]["groups"][1]["image"]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    done = called(command, str(path))
    assert done.exit_code == 2
    assert SENTENCE in done.stderr


@pytest.mark.parametrize("product", ["Tesla-T4", "NVIDIA-A10", "NVIDIA-H100-80GB-HBM3", "NVIDIA-B200", "unknown"])
def test_what_the_operators_images_serve_needs_no_image(product: str) -> None:
    assert image_errors(spec(product)) == []


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_an_image_of_the_groups_own_is_taken_at_its_word(role: str) -> None:
    assert len(image_errors(spec(role=role))) == 1
    assert image_errors(spec(role=role, image="registry.example.com/x")) == []


def test_an_operator_with_other_images_says_what_they_serve() -> None:
    assert OperatorSettings().image_errors(spec()) == [SENTENCE]
    for given in ("7.0,8.0", "any"):
        assert OperatorSettings.read({"DOVETAIL_ROLLOUT_CAPABILITIES": given}).image_errors(spec()) == []
    trainer_only = OperatorSettings.read({"DOVETAIL_TRAINER_CAPABILITIES": "7.0,8.0"})
    assert trainer_only.image_errors(spec()) == [SENTENCE]
    newer = OperatorSettings.read({"DOVETAIL_ROLLOUT_CAPABILITIES": "9.0"})
    sentence, _ = newer.image_errors(spec("NVIDIA-A10"))
    assert "the operator's image has kernels for 9.0; build an image with a torch that has kernels for 8.6" in sentence
    with pytest.raises(ValueError, match=r"DOVETAIL_ROLLOUT_CAPABILITIES: 'sm_70' is no compute capability"):
        OperatorSettings.read({"DOVETAIL_ROLLOUT_CAPABILITIES": "sm_70"})
