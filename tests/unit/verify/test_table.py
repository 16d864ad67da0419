"""Rules by name, and thresholds that mean something."""

from __future__ import annotations

from typing import cast

import pytest

from outrider.core.config import EXACT_SAMPLERS, LOSSY_SAMPLERS
from outrider.core.errors import ConfigError
from outrider.verify.rules import EXACT, LOSSY, LossyRule, rule_for


def test_every_sampler_of_the_configuration_has_a_rule() -> None:
    assert tuple(EXACT) == EXACT_SAMPLERS
    assert tuple(LOSSY) == LOSSY_SAMPLERS


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_rule_has_no_threshold(name: str) -> None:
    with pytest.raises(ConfigError, match="no threshold") as caught:
        rule_for(name, 0.3)
    assert "typical" in str(caught.value.hint)


def test_a_threshold_above_all_probabilities_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 1"):
        rule_for("nucleus", 5)
    assert cast(LossyRule, rule_for("top_k", 40)).leniency == 40
