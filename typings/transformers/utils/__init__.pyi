"""See the folder above."""

from typing import Any

logging: Any
