"""The file of a verb's --figure."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.output import check_writable
from outrider.core.errors import ConfigError, MachineError
from outrider_lab.bench.drawing import why_not


def figure_file(name: str | None) -> Path | None:
    """Checked before anything runs. Raises ConfigError and MachineError."""
    if name is None:
        return None
    path = Path(name)
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(
            f"--figure {name}: a figure is an SVG file.", hint="--figure lanes.svg, for example"
        )
    reason = why_not()
    if reason is not None:
        raise MachineError(reason, hint="leave --figure out")
    check_writable(path)
    return path
