"""Structures that native code reads are laid out in Python as in C++."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import Structure
from pathlib import Path
from typing import Any

import pytest

from outrider.core.env import cache_folder, compiler
from outrider.kernels.native import build, forward, layers
from outrider.kernels.native import build as levels
from outrider.kernels.native.ops import LinearStruct, PassStruct
from outrider.kernels.native.rounds import (
    LookupRoom,
    MemoryStruct,
    NgramSettings,
    RoundStruct,
    Row,
    SuffixSettings,
)
from outrider.kernels.native.sampling import Drawing, TreeDrafts, TreeRow, TreeStruct
from outrider.plugins.heads import native_blocks, native_choice, native_heads

_STRUCTURES: dict[str, tuple[tuple[str, type[Structure], dict[str, str]], ...]] = {
    "round.cpp": (
        ("Memory", MemoryStruct, {"described": "pass"}),
        ("Row", Row, {}),
        ("Round", RoundStruct, {}),
        ("Pass", PassStruct, {}),
    ),
    "tree_drafts.cpp": (
        ("Tree", TreeStruct, {}),
        ("Drawing", Drawing, {}),
        ("TreeRow", TreeRow, {}),
        ("TreeDrafts", TreeDrafts, {}),
    ),
    "suffix.cpp": (("SuffixSettings", SuffixSettings, {}), ("LookupRoom", LookupRoom, {})),
    "ngram.cpp": (("NgramSettings", NgramSettings, {}),),
    "head_drafts.cpp": (
        ("WideTree", native_choice._Wide, {}),  # pyright: ignore[reportPrivateUsage]
        ("Choice", native_choice.ChoiceStruct, {}),
        ("HeadStep", native_heads._Step, {}),  # pyright: ignore[reportPrivateUsage]
        ("Head", native_heads._Head, {}),  # pyright: ignore[reportPrivateUsage]
        ("HeadDrafts", native_heads._Drafts, {}),  # pyright: ignore[reportPrivateUsage]
    ),
    "forward.cpp": (
        ("Linear", LinearStruct, {}),
        ("Net", layers._Net, {}),  # pyright: ignore[reportPrivateUsage]
        ("Mixture", layers._Mixture, {}),  # pyright: ignore[reportPrivateUsage]
        ("Latent", layers._Latent, {}),  # pyright: ignore[reportPrivateUsage]
        ("DeltaLayer", layers.DeltaStruct, {}),
        ("DeltaPass", layers._Pass, {}),  # pyright: ignore[reportPrivateUsage]
        ("Rule", forward._Rule, {}),  # pyright: ignore[reportPrivateUsage]
        ("Entrance", forward._Entrance, {}),  # pyright: ignore[reportPrivateUsage]
        ("Layer", forward._Layer, {}),  # pyright: ignore[reportPrivateUsage]
        ("Decoder", forward._Decoder, {}),  # pyright: ignore[reportPrivateUsage]
        ("BlockSight", native_blocks._Sight, {}),  # pyright: ignore[reportPrivateUsage]
        ("BlockText", native_blocks._Text, {}),  # pyright: ignore[reportPrivateUsage]
        ("BlockRefiner", native_blocks._Refiner, {}),  # pyright: ignore[reportPrivateUsage]
        ("BlockConv", native_blocks._Conv, {}),  # pyright: ignore[reportPrivateUsage]
        ("Block", native_blocks._Block, {}),  # pyright: ignore[reportPrivateUsage]
    ),
}


@pytest.mark.sample(1)
@pytest.mark.wide
@pytest.mark.parametrize("source", _STRUCTURES)
def test_the_compiler_agrees_on_every_field(source: str, tmp_path: Path) -> None:
    built = build.built_kernels(compiler(), cache_folder())
    if built.library is None:
        pytest.skip(f"no native kernels: {built.refusal}")
    lines = [f'#include "{source}"', "#include <cstddef>"]
    for name, mirror, renamed in _STRUCTURES[source]:
        lines.append(f"static_assert(sizeof(outrider::{name}) == {ctypes.sizeof(mirror)});")
        for item, *_ in mirror._fields_:  # pyright: ignore
            at: Any = getattr(mirror, item)  # pyright: ignore
            there = f"outrider::{name}, {renamed.get(item, item)}"
            size = f"sizeof(decltype(outrider::{name}::{renamed.get(item, item)}))"
            lines.append(f"static_assert(offsetof({there}) == {at.offset});")
            lines.append(f"static_assert({size} == {at.size});")
    check = tmp_path / "check.cpp"
    check.write_text("\n".join(lines))
    command = build._compiler_command(compiler())  # pyright: ignore[reportPrivateUsage]
    sources = f"-I{levels.SOURCES}"
    flags = [*levels.FLAGS, build._tuning(), "-fsyntax-only", "-Wno-invalid-offsetof"]  # pyright: ignore
    done = subprocess.run(
        [*command, *flags, sources, str(check)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
