"""Command lines run in this process, in an empty folder, without OUTRIDER_ variables."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from doubles.command_line import Command, Finished, remembered_parsers
from outrider.cli.main import run
from outrider.cli.session import TOLD_BY_NOTES
from outrider.core.errors import progress


@pytest.fixture(scope="session", autouse=True)
def parsers() -> Iterator[None]:
    """A process of a user's parses one command line."""
    with remembered_parsers():
        yield


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """What commands change of it, as on a terminal, is put back."""
    loggers = [*map(logging.getLogger, TOLD_BY_NOTES), progress]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def no_models_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names mean the same on a machine where scripts/real_model has run."""
    monkeypatch.setattr("outrider.models.loading.cache_folder", lambda: None)


@pytest.fixture
def outrider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:  # noqa: TID251
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def call(*words: str, stdin: str = "") -> Finished:
        monkeypatch.setattr(sys, "stdin", StringIO(stdin))
        capsys.readouterr()
        code = run(words)
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return call
