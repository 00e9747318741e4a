"""What the benchmark of lags prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def print_line(line: Mapping[str, Any]) -> None:
    """Prints one line of JSON at once, numbers with four places."""
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)
