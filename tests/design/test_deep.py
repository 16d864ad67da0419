"""Each test that tests/deep.toml leaves out of the gate is there."""

from __future__ import annotations

import tomllib
from pathlib import Path

TESTS = Path(__file__).parents[1]
LEFT_OUT = tomllib.loads((TESTS / "deep.toml").read_text(encoding="utf-8"))


def test_each_is_a_test_that_exists() -> None:
    for name, instead in LEFT_OUT.items():
        file, _, function = name.partition("::")
        source = (TESTS / file).read_text(encoding="utf-8")
        assert f"def {function.partition('[')[0]}(" in source, name
        assert instead, name
