"""Sizes of models by name: of a hub that is out of reach, at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from outrider.cli.models import read_spec
from outrider.core.errors import CheckpointError


def test_a_hub_that_is_out_of_reach_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at port 9, and nobody sleeps to try again."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"sleeps {seconds} s")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(CheckpointError, match=r":9 cannot be reached") as caught:
        read_spec("org/name")
    assert "outrider models list" in str(caught.value.hint)
