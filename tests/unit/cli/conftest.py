"""Commands run in this process: what they change of it is put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from outrider.cli.session import TOLD_BY_NOTES


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (*TOLD_BY_NOTES, "outrider.kernels.build")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
