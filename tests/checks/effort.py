"""How many examples a property gets: a share of the profile's, so that `deep` deepens all."""

from __future__ import annotations

from hypothesis import settings


def examples(percent: int) -> settings:
    profile = settings()
    return settings(profile, max_examples=max(1, profile.max_examples * percent // 100))
