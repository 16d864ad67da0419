"""See the folder above."""

from typing import Any

mxfp4: Any
