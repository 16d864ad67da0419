"""See `transformers`."""

from typing import Any

Conv1D: Any
