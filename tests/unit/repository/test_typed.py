"""Each part of the namespace package says that it has types (PEP 561)."""

from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_package_has_the_marker():
    packages = [path for path in ROOT.glob("*/dovetail/*") if any(path.glob("*.py"))]
    assert len(packages) > 10
    assert [path.name for path in packages if not (path / "py.typed").is_file()] == []
