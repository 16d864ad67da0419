"""Drafting ahead where it does not pay: tests are of what it does, not of whether it should."""

from __future__ import annotations

import pytest

from outrider.core.budget import JobTrace
from outrider.drafters.ahead.pace import Pace
from outrider.sched.contest import Contest


def keep_drafting_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on although here it takes longer than verifying."""

    def learn_nothing(pace: Pace, seconds: float, window: float, saved: float) -> None:
        del pace, seconds, window, saved

    def keep_on(contest: Contest, trace: JobTrace, guess: float | None) -> None:
        del contest, trace, guess

    monkeypatch.setattr(Pace, "observe", learn_nothing)
    monkeypatch.setattr(Contest, "observe", keep_on)
