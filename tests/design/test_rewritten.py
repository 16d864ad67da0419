"""scripts/rewrite_tests.py keeps what pytest itself would."""

# What pytest does itself has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

SCRIPT = Path(__file__).parents[2] / "scripts" / "rewrite_tests.py"


def test_what_is_kept_is_what_pytest_takes(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_from_file_location("rewrite_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script: Any = module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr("sys.pycache_prefix", None)
    file = tmp_path / "test_one.py"
    file.write_text("def test_it():\n    one = 1\n    assert one == 2\n")
    script.keep(pytestconfig, [file])
    code = rewrite._read_pyc(file, tmp_path / "__pycache__" / f"test_one{rewrite.PYC_TAIL}")
    assert code is not None
    found: dict[str, Any] = {}
    exec(code, found)  # noqa: S102
    # A plain assertion has no words.
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        found["test_it"]()
    file.write_text(f"{file.read_text()}\n")
    assert rewrite._read_pyc(file, tmp_path / "__pycache__" / f"test_one{rewrite.PYC_TAIL}") is None
