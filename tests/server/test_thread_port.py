"""What the server says of an engine that is loaded."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from outrider import LLM
from outrider.models.loading import resolve
from outrider.server.thread_port import card_of

pytestmark = pytest.mark.weights


@pytest.mark.parametrize(
    ("options", "is_fixed"),
    [
        ({}, True),
        ({"controller": "band"}, False),
        # Heads that say that they do not pay are measured as they run, unless K is given.
        ({"draft": "medusa"}, False),
        ({"draft": "medusa", "k": 4}, True),
    ],
)
def test_k_is_fixed_unless_something_chooses_it(options: dict[str, Any], is_fixed: bool) -> None:
    if "draft" in options:
        folder = resolve("outrider/embedded").parent / options["draft"]
        options = {**options, "draft": folder}
    with closing(LLM(**options)) as llm:
        assert card_of(llm).fixed_k == is_fixed
