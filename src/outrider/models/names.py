"""Names of models: those of the Hugging Face hub, and those of stores on this machine.

On the hub a name is `ORG/REPO`, with a branch, tag or commit after `@`. For a repository of GGUF
files a quantisation may follow after `:`, as in llama.cpp and Ollama:
`unsloth/Qwen3-8B-GGUF:Q4_K_M`.

The hub's cache has a folder `models--ORG--NAME/` for each model: `refs/main` names the commit of
the branch `main`, and `snapshots/COMMIT/` has its files. Ollama has a manifest for each name and
tag, `manifests/HOST/OWNER/NAME/TAG`, whose layer of type `model` names a file of `blobs/` by its
hash. LM Studio has `PUBLISHER/REPOSITORY/FILE.gguf`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from outrider.core.env import ollama_models
from outrider.core.errors import CheckpointError, did_you_mean
from outrider.core.files import FileKind, read_json, read_text
from outrider.models.gguf.reader import parts_of

# Folders of the embedded models, and of heads for them, which are no models.
ALIASES = {
    "outrider/embedded": "target",
    "outrider/embedded-draft": "draft",
    "outrider/embedded-hybrid": "hybrid/target",
}
HEAD_ALIASES = {f"outrider/embedded-{kind}": kind for kind in ("eagle", "medusa", "mtp")}

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model's hub id and the folder of its newest commit, if any; files may be missing."""

    name: str
    snapshot: Path | None


def cached_models() -> list[CachedModel]:
    """The models in the cache, sorted by name."""
    # Imported here: a local model needs no hub client.
    from huggingface_hub import constants

    stores = sorted(Path(constants.HF_HUB_CACHE).expanduser().glob(f"{_PREFIX}*/"))
    return [
        CachedModel(store.name.removeprefix(_PREFIX).replace("--", "/", 1), _newest(store))
        for store in stores
    ]


def _newest(store: Path) -> Path | None:
    """The folder of the commit of `main`, or else of any commit."""
    snapshots = store / "snapshots"
    try:
        return snapshots / read_text(store / "refs" / "main", FileKind.SYSTEM).strip()
    except (OSError, ValueError):
        return next(iter(sorted(snapshots.glob("*/"))), None)


_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_OLLAMA = (".ollama/models", "/usr/share/ollama/.ollama/models")
_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")
# Limit for one store, so that a link to a whole disk does not delay a command.
_MOST = 1000


def stored_models() -> list[tuple[Path, str]]:
    """The first file of each model, with its name; an unreadable store counts as empty."""
    try:
        home = Path.home()
    except RuntimeError:
        return []
    own = ollama_models()
    found: dict[Path, str] = {}
    with suppress(OSError):
        for store in (Path(own),) if own else tuple(home / name for name in _OLLAMA):
            found |= islice(_of_ollama(store), _MOST)
        for name in _LM_STUDIO:
            found |= islice(_of_lm_studio(home / name), _MOST)
    return sorted(found.items(), key=lambda item: item[1])


def _of_ollama(store: Path) -> Iterator[tuple[Path, str]]:
    for manifest in sorted(islice((store / "manifests").glob("*/*/*/*"), _MOST)):
        *_, owner, name, tag = manifest.parts
        for digest in _model_layers(manifest):
            blob = store / "blobs" / f"sha256-{digest}"
            if blob.is_file():
                known = name if owner == "library" else f"{owner}/{name}"
                yield blob, f"{known}:{tag} of Ollama"


def _model_layers(manifest: Path) -> Iterator[str]:
    try:
        loaded = read_json(manifest, FileKind.CONFIG)
    except (OSError, ValueError):
        return
    layers = cast("dict[str, Any]", loaded).get("layers") if isinstance(loaded, dict) else None
    for layer in cast("list[Any]", layers) if isinstance(layers, list) else []:
        entry = cast("dict[str, Any]", layer) if isinstance(layer, dict) else {}
        digest = _DIGEST.fullmatch(str(entry.get("digest")))
        if entry.get("mediaType") == _MODEL_LAYER and digest:
            yield digest[1]


def _of_lm_studio(store: Path) -> Iterator[tuple[Path, str]]:
    for file in sorted(islice(store.glob("*/*/*.gguf"), _MOST)):
        if not file.name.startswith("mmproj"):
            with suppress(CheckpointError):
                yield parts_of(file)[0], f"{file.parent.name}/{file.name} of LM Studio"


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
