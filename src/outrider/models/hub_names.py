"""Names of models on the Hugging Face hub, and the choice of one GGUF file of a repository.

A name is `ORG/REPO`, with a branch, tag or commit after `@`. For a repository of GGUF files a
quantisation may follow after `:`, as in llama.cpp and Ollama: `unsloth/Qwen3-8B-GGUF:Q4_K_M`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.core.errors import CheckpointError, did_you_mean

MAIN = "main"
HUB_ID = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<tag>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
# Data only: nothing that is fetched is ever executed.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# Weights in another layout, and subfolders: a second copy of the model that nothing would read.
HUB_NOISE = ["consolidated*", "*/*"]
GGUF = ".gguf"
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_TAG = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d(?:_\w+)?|TQ\d_\d|BF16|F16|FP16|F32|MXFP4(?:_MOE)?|NVFP4))$",
    re.I,
)
# The quantisation that is taken where a name has none, as llama.cpp takes it, and others then.
_USUAL = ("Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_0", "MXFP4", "MXFP4_MOE", "Q8_0")
# Files of other models: eyes, and what quantisation was calibrated with.
_OTHERS = ("mmproj", "imatrix")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository with a branch, tag or commit, and the quantisation of a GGUF file or ""."""

    repo: str
    revision: str = MAIN
    tag: str = ""

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """The parts of `name`; None if it is no name of a model on the hub."""
        found = HUB_ID.fullmatch(name)
        if found is None:
            return None
        return cls(found["repo"], found["revision"] or MAIN, found["tag"] or "")

    def __str__(self) -> str:
        """The name as loaders accept it."""
        tag = f":{self.tag}" if self.tag else ""
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{tag}{revision}"


def tags_of(files: Iterable[str]) -> dict[str, list[str]]:
    """The models among the files of a repository: the parts of each by its quantisation, or by its
    name if that has none. Of several models with one quantisation the first has the shortest name.
    """
    stems: dict[str, list[str]] = {}
    for file in files:
        stem = file.removesuffix(GGUF)
        if stem != file and not any(other in file.lower() for other in _OTHERS):
            stems.setdefault(_PART.sub("", stem), []).append(file)
    found: dict[str, list[str]] = {}
    for stem in sorted(stems, key=lambda stem: (len(stem), stem)):
        folder, _, name = stem.rpartition("/")
        tag = _TAG.search(name) or _TAG.search(folder)
        found.setdefault(tag[1].upper() if tag else name, sorted(stems[stem]))
    return found


def chosen_gguf(name: HubName, files: Iterable[str]) -> tuple[str, list[str]]:
    """The quantisation that `name` asks for, or the usual one, and its files in order.

    Raises CheckpointError if there is none, with those that there are, or if a part is missing.
    """
    tags = tags_of(files)
    by_case = {tag.upper(): tag for tag in tags}
    if not name.tag:
        usual = [tag for tag in _USUAL if tag in tags]
        tag = (usual or sorted(tags))[0] if tags else ""
    else:
        tag = by_case.get(name.tag.upper(), "")
    if not tag:
        there = f"it has {', '.join(sorted(tags))}" if tags else "it has no GGUF files"
        raise CheckpointError(
            f"{name.repo} has no file quantised to {name.tag}.",
            hint=f"{did_you_mean(name.tag, tags)} {there}".strip(),
        )
    parts = tags[tag]
    counted = _PART.search(parts[0].removesuffix(GGUF))
    if counted and len(parts) != int(counted[2]):
        raise CheckpointError(
            f"{name.repo} has {len(parts)} of the {int(counted[2])} parts of {parts[0]}.",
            hint="choose another quantisation: " + ", ".join(sorted(tags)),
        )
    return tag, parts
