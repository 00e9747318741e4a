"""What the papers' benchmark has, for tests: research/ is not a package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "research"))

from papers import common, every_placement, free_placements, routing

__all__ = ["common", "every_placement", "free_placements", "routing"]
