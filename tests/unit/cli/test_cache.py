"""`outrider cache`: what it lists, deletes and finds damaged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from doubles.command_line import Command
from outrider.cache.pages import PageName
from outrider.plugins.prompt_store.files import StoreFolder

MODEL = hashlib.sha256(b"model").hexdigest()[:32]
ORIGIN = hashlib.sha256(b"origin").hexdigest()


def written(folder: Path) -> list[Path]:
    """A store with a page and a state of one model; return their files."""
    store = StoreFolder.opened(str(folder))
    store.describe(MODEL, {"name": "tiny"})
    name = PageName(ORIGIN, 0, (1, 2))
    for kind in ("page", "state"):
        store.write(kind, MODEL, name, [np.arange(4, dtype=np.uint8)], used=10**18)
    return [store.path(kind, MODEL, name) for kind in ("page", "state")]


def test_a_store_is_listed_checked_and_emptied(outrider: Command, tmp_path: Path) -> None:
    page, state = written(tmp_path / "prompts")
    (listed,) = json.loads(outrider("cache", "list", "prompts", "--json").out)["models"]
    assert (listed["name"], listed["pages"], listed["states"]) == ("tiny", 1, 1)
    assert listed["used"] == "2001-09-09T01:46:40+00:00"
    assert outrider("cache", "verify", "prompts").out.splitlines()[-1] == "2 files, 0 damaged."
    page.write_bytes(page.read_bytes()[:-1] + b"?")
    found = outrider("cache", "verify", "prompts", "--json")
    damaged = {str(page.relative_to(page.parents[2])): "its checksum is wrong; deleted"}
    assert (found.code, json.loads(found.out)["damaged"]) == (1, damaged)
    assert (page.exists(), state.exists()) == (False, True)
    assert json.loads(outrider("cache", "clear", "prompts", "--json").out)["files"] == 1
    assert "has no prompts" in outrider("cache", "list", "prompts").out


@pytest.mark.parametrize("verb", ["list", "clear", "verify"])
def test_a_missing_folder_is_named_with_a_command(outrider: Command, verb: str) -> None:
    found = outrider("cache", verb)
    assert found.code == 2
    assert "FOLDER is missing: the folder of --prompt-store." in found.err
    assert f"try: outrider cache {verb} ~/prompts" in found.err
    assert outrider("cache", verb, "none").code == 2
