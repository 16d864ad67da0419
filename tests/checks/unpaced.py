"""Drafting ahead where it does not pay: tests are of what it does, not of whether it should."""

from __future__ import annotations

import pytest

from outrider.drafters.ahead.table import Pace


def keep_drafting_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on although here it takes longer than verifying. With a `hybrid_threshold` of 0 the
    schedule asks for it in any case."""

    def learn_nothing(pace: Pace, seconds: float, window: float, saved: float) -> None:
        del pace, seconds, window, saved

    monkeypatch.setattr(Pace, "observe", learn_nothing)
