"""What a model's keys and values depend on, as a digest; only models of one digest share files.

That is every byte of the weights, the configuration as it is used (rotary positions, window), the
formats of numbers, the layout of a page, and what decides the last bits: kernels, CPU, libraries
and our own code. Adapters (LoRA) are merged into the weights before they are loaded.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

from outrider.api.plan import LoadPlan
from outrider.cache.paged_kv import PagedKV, paged_of
from outrider.cache.pages import PageStore
from outrider.core.config import EngineConfig
from outrider.core.env import cache_folder, compiler
from outrider.core.errors import ConfigError
from outrider.core.fields import size
from outrider.core.files import FileKind, open_regular, read_bytes, read_json, write_private
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import cpu_identity
from outrider.models.checkpoint import open_checkpoint
from outrider.models.decoder import Decoder
from outrider.models.heads import HeadsToLoad
from outrider.plugins.prompt_store.files import FORMAT, StoreFolder
from outrider.plugins.prompt_store.store import Pace, PromptStore

# Folders of our code that computes keys, values and states.
_CODE = ("cache", "core", "kernels", "models", "plugins")
_KNOWN = "weights.json"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CHUNK = 1 << 22
# A store holds at least so many pages.
_LEAST_PAGES = 32
# Settings of which a draft model's keys and values do not depend.
_OF_TARGETS: Mapping[str, Any] = {"quantise": "none", "kv_dtype": "auto"}


def attach(
    target: Decoder,
    draft: Decoder | None,
    plan: LoadPlan,
    heads: Sequence[HeadsToLoad],
    folder: StoreFolder,
) -> list[PromptStore] | str:
    """Give the memories of both models stores, which are returned; or the reason why the target
    gets none. Raises ConfigError if the folder holds too few pages."""
    hidden = plan.hidden_layers(heads)
    kv = paged_of(target.state)
    # A draft model may be idle while the target runs.
    pace = Pace(lambda: kv is None or kv.is_idle)
    found = _attach(target, plan.folder, plan.settings, folder, hidden, pace)
    if isinstance(found, str):
        return found
    stores = [found]
    if draft is not None and plan.model_folder is not None:
        config = replace(plan.settings, **_OF_TARGETS)
        found = _attach(draft, plan.model_folder, config, folder, (), pace)
        stores += [] if isinstance(found, str) else [found]
    return stores


def _attach(
    model: Decoder,
    weights: Path,
    config: EngineConfig,
    folder: StoreFolder,
    hidden_layers: Sequence[int],
    pace: Pace,
) -> PromptStore | str:
    kv = paged_of(model.state)
    if kv is None or kv.arena.device.type != "cpu":
        return f"the keys and values of {model.spec.name} are not in the memory of a CPU"
    if config.tensor_parallel > 1:
        return "several processes share the model"
    if not model.kernels.exact:
        return "rows of these kernels depend on their batch, so texts would depend on the store"
    parts = kv.parts(0)
    num_bytes = sum(part.size for part in parts)
    if num_bytes * _LEAST_PAGES > folder.most_bytes:
        raise ConfigError(
            f"prompt_store: {size(folder.most_bytes)} hold fewer than {_LEAST_PAGES} pages of "
            f"{model.spec.name}, of {size(num_bytes)} each.",
            hint="name a larger size: --prompt-store FOLDER:20GB",
        )
    about = {
        **identity(model, config, kv),
        "weights": weights_digest(weights, folder),
        "hidden_layers": [*hidden_layers],
    }
    text = json.dumps(about, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    store = PromptStore(folder, digest, pace, about)
    kv.store = cast("PageStore", store)
    return store


def identity(model: Decoder, config: EngineConfig, kv: PagedKV) -> Mapping[str, Any]:
    """Return what a model's keys and values depend on besides its weights, as a JSON object."""
    kernels = model.kernels
    layout = [[*part.shape] for part in kv.parts(0)]
    return {
        "format": FORMAT,
        "name": model.spec.name,
        "config": _ADDRESS.sub("", repr(model.config)),
        "dtype": str(kv.arena.dtype),
        "quantise": config.quantise,
        "kv_dtype": config.kv_dtype,
        "page_size": kv.page_size,
        "layout": layout,
        "states": repr(config.state_rollback) if model.spec.state_bytes else "",
        "kernels": [[one.op, one.name, one.kind] for one in kernels.choices],
        "library": _library(),
        "cpu": hashlib.sha256(cpu_identity().encode()).hexdigest(),
        "threads": 0 if "native" in kernels.choices[0].name else torch.get_num_threads(),
        "versions": {**_versions(), "python": platform.python_version()},
        "code": code_digest(),
    }


def weights_digest(path: Path, folder: StoreFolder) -> str:
    """The digest of all weights of a model. A file is read again only if it is another file, or was
    changed, since the store saw it."""
    notes = folder.folder / _KNOWN
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        noted = read_json(notes, FileKind.CALIBRATION)
        if isinstance(noted, dict):
            items = cast("dict[str, object]", noted).items()
            known = {at: digest for at, digest in items if isinstance(digest, str)}
    found: dict[str, str] = {}
    for file in open_checkpoint(path).files():
        at = file.resolve()
        stat = at.stat()
        # The time of change (ctime) is the system's own: no program can set it back.
        key = (
            f"{at} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        )
        found[key] = known[key] if key in known else _digest_of(at)
    if found.keys() - known.keys():
        with suppress(OSError):
            write_private(notes, json.dumps(known | found, indent=1).encode())
    return hashlib.sha256("\n".join(found.values()).encode()).hexdigest()


def _digest_of(file: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(file) as stream:
        while data := stream.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


@cache
def code_digest() -> str:
    """The digest of the sources that compute keys, values and states."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for part in _CODE:
        for file in sorted((root / part).rglob("*.py")):
            digest.update(file.name.encode() + b"\0" + read_bytes(file, FileKind.SYSTEM))
    return digest.hexdigest()


def _library() -> str:
    """The name of the native library, which depends on sources, compiler and flags."""
    library = built_kernels(compiler(), cache_folder()).library
    name = "" if library is None else library._name  # pyright: ignore[reportPrivateUsage] - its only name
    return Path(name).name


def _versions() -> Mapping[str, str]:
    found = {"torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        found["transformers"] = version("transformers")
    return found
