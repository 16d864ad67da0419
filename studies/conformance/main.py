"""Conformance against suites of others: `scripts/conformance [SUITE ...]`.

Prints for each suite how many cases are right, wrong and refused, and how many differ in a way that
studies/pages/conformance.md lists. Exits with 1 where one is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance import blocks, chat, models, schemas, templates, vocabularies
from conformance.client import PeerClient
from conformance.counts import Suite
from conformance.files import load_gguf
from options import Flag, one_of, read

from outrider.models.loading import prepare_torch

_MODELS = "tiny-models"
_SUITES = ("vocabularies", "templates", "chat", "blocks", "models", "schemas")
FLAGS = {
    "suites": Flag(kind=one_of(_SUITES), default=(), is_word=True),
    "folder": Flag(kind=Path, text="where scripts/peers unpacked"),
    "archive": Flag(kind=str, text="folder of the unpacked archive in it"),
    "build": Flag(kind=Path, text="folder of the build"),
    "schemas": Flag(kind=Path, text="source archive of jsonschema"),
    "texts": Flag(kind=int, default=2000, text="random texts of a vocabulary"),
    "json": Flag(kind=Path | None, default=None, text="file for the counts"),
}


def main() -> int:
    given = read("scripts/conformance", __doc__, FLAGS)
    source, build = given.folder / given.archive / "vendor" / "llama.cpp", given.build
    with TemporaryDirectory() as scratch:
        peer = PeerClient(given.folder / given.archive, build / "bin", Path(scratch))
        makers: Mapping[str, Callable[[], Iterator[Suite]]] = {
            "vocabularies": partial(vocabularies.suites, peer, source / "models", given.texts),
            "templates": partial(templates.suites, source / "models" / "templates"),
            "chat": partial(chat.suites, source),
            "blocks": lambda: blocks.suites(load_gguf(source)),
            "models": lambda: models.suites(peer, load_gguf(source), given.folder / _MODELS),
            "schemas": partial(schemas.suites, given.schemas),
        }
        found: list[Suite] = []
        with peer:
            for name in given.suites or makers:
                for suite in makers[name]():
                    found.append(suite)
                    print(suite.line(), flush=True)
    for suite in found:
        print(suite.details(), end="")
    if given.json:
        records = [suite.record() for suite in found]
        given.json.write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return int(any(suite.num_wrong for suite in found))


if __name__ == "__main__":
    prepare_torch(deterministic=True, threads=1)
    sys.exit(main())
