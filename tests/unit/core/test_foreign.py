"""Names of other projects: none is read, each is answered with the name that it has here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from outrider.api.structure import StructureOptions
from outrider.core import errors
from outrider.core.errors import ConfigError, Foreign, foreign_names, hint_for, notes_on
from outrider.core.params import SamplingParams
from outrider.core.plugins import install_command
from outrider.core.settings import SETTINGS, environment, file

# A name that is also ours cannot be another's.
STRUCTURES = get_type_hints(StructureOptions)
OURS = {*SETTINGS, *(item.flag for item in SETTINGS.values())}


@pytest.mark.parametrize("item", foreign_names().values(), ids=lambda item: item.name)
def test_a_name_of_others_leads_to_a_setting_or_says_why_there_is_none(item: Foreign) -> None:
    assert item.name not in OURS
    known = {*SETTINGS, *STRUCTURES, *get_type_hints(SamplingParams)}
    assert item.here in known if item.here else item.note
    if item.here in SETTINGS:
        setting = SETTINGS[item.here]
        assert item.spelled in (setting.name, setting.flag, setting.variable)


def test_every_name_is_there_once() -> None:
    rows = json.loads(Path(errors.__file__).with_name("names_of_others.json").read_text("utf-8"))
    assert len(foreign_names()) == sum(len(names.split()) for _, names, _ in rows)


@pytest.mark.parametrize(
    ("key", "here"),
    [("base_model", "'target'"), ("draft_mode", "'drafter'"), ("max_memory_mb", "'arena_tokens'")],
)
def test_a_key_of_others_in_a_file_is_an_error_that_names_ours(
    tmp_path: Path, key: str, here: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{key}: 1\n")
    with pytest.raises(ConfigError, match=key) as caught:
        file(path)
    assert f"did you mean {here}" in str(caught.value.hint)


def test_what_has_no_counterpart_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("implementation: fake\n")
    with pytest.raises(ConfigError) as caught:
        file(path)
    assert "no counterpart here: the scripted model" in str(caught.value.hint)


def test_a_variable_of_ours_by_the_name_of_others() -> None:
    with pytest.raises(ConfigError) as caught:
        environment({"OUTRIDER_MAX_NEW_TOKENS": "3"})
    assert "'max_tokens'" in str(caught.value.hint)


def test_variables_of_others_are_told_and_not_read() -> None:
    cpu, new, sync = notes_on(["SPECDEC_SYNC_MODE", "SHARPI_CPU_GDN", "SPECDEC_NEW", "HOME"])
    assert cpu.startswith("SHARPI_CPU_GDN is set, which is not read here; did you mean")
    assert "outrider config" in new
    assert "'OUTRIDER_LANE_SYNC'" in sync
    assert notes_on(["HOME", "OUTRIDER_K"]) == []
    assert hint_for("nothing of anybody") is None


@pytest.mark.parametrize(
    ("extra", "packages"),
    [("server", "granian starlette msgspec prometheus_client"), ("cluster", "ray granian")],
)
def test_an_extra_is_installed_by_the_names_of_its_packages(extra: str, packages: str) -> None:
    command = install_command(extra)
    assert set(packages.split()) <= set(re.findall(r"\w+", command))
    assert "outrider" not in command
