"""Loads a model by name: finds its folder, decides precision and device, reads the weights.

A name is an alias of a model inside this package, a local folder, or a Hugging Face hub id with an
optional revision. Only JSON, safetensors and tokenizer files are fetched from the hub, and nothing
that is fetched is ever executed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from outrider.core.env import cache_folder, make_cublas_deterministic
from outrider.core.errors import (
    CheckpointError,
    ConfigError,
    MachineError,
    did_you_mean,
    given,
)
from outrider.core.protocols import DraftNeeds
from outrider.core.spec import KV_GROUP, DecoderConfig, ModelSpec
from outrider.kernels.operators import (
    DTYPES,
    compile_ahead,
    for_kinds,
    pick_device,
    pick_dtype,
    tried,
)
from outrider.kernels.registry import AS_STORED, choose
from outrider.models.checkpoint import open_checkpoint
from outrider.models.configs import GPT2Config, LayeredConfig, LlamaConfig
from outrider.models.decoder import Decoder, LoadOptions
from outrider.models.families import (
    FAMILIES,
    model_type_of,
    native_config_of,
    row_of,
)
from outrider.models.gguf.reader import gguf_in, header_of, is_gguf, parts_of
from outrider.models.llama import ALONE, GPT2Model, LlamaModel
from outrider.models.llama_weights import Comm
from outrider.models.names import ALIASES, HEAD_ALIASES, HubName, cached_models
from outrider.models.weights import Placement, Weights
from outrider.pairs.catalog import FIRST_MODEL, is_called, models_called

_log = logging.getLogger(__name__)

_PAIRS = Path(str(files("outrider.pairs") / "tiny"))
# Models from before the hub had organisations.
_MOVED = {
    **{
        name: f"openai-community/{name}"
        for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    },
    "distilgpt2": "distilbert/distilgpt2",
}
_SHORTEST_FAMILY = 3


def prepare_torch(*, deterministic: bool, threads: int) -> None:
    """Set this process up to load models; with 0 threads PyTorch keeps its own number.

    Raises MachineError in a forked child of a process that loaded a model: PyTorch would wait for
    ever for threads that a fork does not copy.
    """
    process = _loading_process()
    if process != os.getpid():
        raise MachineError(
            f"process {process} loaded a model and was then forked; PyTorch's threads do not "
            "survive that.",
            hint='start the process with multiprocessing\'s "spawn", or fork before the first LLM',
        )
    if deterministic:
        make_cublas_deterministic()
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
    if threads:
        torch.set_num_threads(threads)


@cache
def _loading_process() -> int:
    """The id of the first process that loaded a model: this one or one that it was forked from."""
    return os.getpid()


def load_model(
    folder: Path, options: LoadOptions, *, name: str = "", comm: Comm = ALONE
) -> Decoder:
    """Load the model in `folder`. Reports call it `name`, by default the folder's name.

    A family without a decoder of ours runs through transformers, over the same arena. A `comm` with
    several ranks makes this process load one share of a model of the Llama family.

    Raises CheckpointError for a bad folder, ConfigError or MachineError for options that the model
    or the machine does not support.
    """
    checkpoint = open_checkpoint(folder)
    family = model_type_of(checkpoint)
    if family not in FAMILIES:
        if options.quantise != "none":
            raise ConfigError(
                f"quantise: models of type {family} run through transformers, and only our own "
                "decoders are quantised.",
                hint=f"leave --quantise at none, or choose one of: {', '.join(FAMILIES)}",
            )
        if options.kv_dtype != "auto":
            raise ConfigError(
                f"kv_dtype: models of type {family} run through transformers, over floats.",
                hint="leave --kv-dtype at auto",
            )
        # Imported here: such a family alone needs transformers, an optional dependency.
        from outrider.plugins.transformers.model import load_adapter

        return load_adapter(folder, options, name=name)
    config = native_config_of(checkpoint).stretched(options.rope)
    config = config.for_context(options.capacity.window)
    device = pick_device(options.device)
    with Weights(checkpoint) as weights:
        stored = weights.stored
        stays = stored.stays(options.dtype, options.quantise)
        own = config.dtype or str(weights.stored_dtype(weights.embedding)).removeprefix("torch.")
        dtype = pick_dtype(options.dtype, own, folder)
        kernels = choose(
            device=device,
            dtype=dtype,
            force_reference=options.force_reference,
            threads=options.threads,
            quantise=AS_STORED if stays else options.quantise,
        )
        held = 0 if kernels.pack_blocks is None else stored.held_bytes
        check_kv_dtype(options.kv_dtype, config, device)
        placement = Placement(
            name or folder.name, dtype, device, options.quantise, held, options.kv_dtype
        )
        if not comm.ordered:
            kernels = replace(kernels, exact=False, trial=None)
        if config.attends_otherwise:
            kernels = for_kinds(kernels)
        made: Any = {"kernels": kernels, "placement": placement, "capacity": options.capacity}
        if isinstance(config, LlamaConfig):
            made["comm"] = comm
        model: Decoder = _decoder_of(config)(config, weights, **made)
        if comm is ALONE:
            step = partial(model.step, needs=DraftNeeds())
            compile_ahead(kernels, config.vocab_size, model.state, lambda row: step([row]))
        model.kernels = tried(model.kernels, config, config.delta_rule)
        return model


def _decoder_of(config: LayeredConfig) -> Callable[..., Decoder]:
    if isinstance(config, GPT2Config):
        return GPT2Model
    make = row_of(config.family).decoder
    return LlamaModel if make is None else make()


def spec_of_config(config: DecoderConfig, dtype: str, kv_dtype: str = "auto") -> ModelSpec:
    """The spec that a model of this config will have when loaded; `auto` as in LoadOptions."""
    width = DTYPES.get(config.dtype if dtype == "auto" else dtype, torch.float32).itemsize
    return replace(config.spec("", bytes_per_weight=width, bytes_per_kv=width), kv_dtype=kv_dtype)


def check_kv_dtype(name: str, config: DecoderConfig, device: torch.device) -> None:
    """Raise ConfigError if keys and values cannot be stored in the dtype `name`."""
    if name == "auto":
        return
    if name != "int8":
        raise ConfigError(f"kv_dtype: unknown value {name!r}.", hint="auto or int8")
    if device.type == "cuda":
        raise ConfigError(
            "kv_dtype int8: the kernels for CUDA read only floats.",
            hint="leave --kv-dtype at auto, or use --device cpu",
        )
    if any(head_dim % KV_GROUP for head_dim in config.head_dims):
        raise ConfigError(
            f"kv_dtype int8: it scales {KV_GROUP} numbers of a head together, and heads of this "
            f"model have {max(config.head_dims)}.",
            hint="leave --kv-dtype at auto",
        )


def shipped_models() -> tuple[str, ...]:
    """The embedded models of this installation: wheels have no hybrid."""
    return tuple(name for name, folder in ALIASES.items() if (_PAIRS / folder).is_dir())


def resolve(name: str) -> Path:
    """The folder or GGUF file of `name`, downloaded if need be. Raises CheckpointError."""
    shipped_as = {**ALIASES, **HEAD_ALIASES}
    if name in shipped_as:
        shipped = _PAIRS / shipped_as[name]
        if not shipped.is_dir():
            raise CheckpointError(
                f"{name} is not part of this installation.",
                hint="a clone of the repository has it; or make one with `outrider train`, and "
                "name its folder",
            )
        return shipped
    folder = _as_path(name)
    if name and folder.is_dir():
        return gguf_in(folder) or folder
    if name and folder.exists():
        if is_gguf(folder):
            return parts_of(folder)[0]
        if folder.suffix.lower() == ".gguf":
            header_of(folder)
        raise CheckpointError(
            f"{name} is a file but no GGUF file; a model is a GGUF file, or a folder with "
            "config.json, safetensors and tokenizer.",
            hint=f"name its folder, {folder.resolve().parent}",
        )
    if folder.suffix == ".gguf":
        raise _no_file(folder)
    if HubName.parse(name) is None:
        found = _called(name, folder)
        return found if isinstance(found, Path) else _from_hub(found, folder)
    return _from_hub(name, folder)


def _no_file(file: Path) -> CheckpointError:
    siblings = sorted(file.parent.glob("*.gguf"))[:20] if file.parent.is_dir() else []
    near = did_you_mean(str(file), map(str, siblings)) if siblings else ""
    return CheckpointError(
        f"there is no file {file}.",
        hint=near
        or "`outrider models list` shows the GGUF files of Ollama and LM Studio; "
        "`outrider run ORG/NAME-GGUF:Q4_K_M` fetches one from the hub",
    )


@cache
def _called(name: str, folder: Path) -> str | Path:
    """The one model on this machine that `name` is short for, in the hub cache or in a folder that
    was made here. Raises CheckpointError if there is none, with models to fetch, or several."""
    cached = [one.name for one in cached_models() if "/" in one.name]
    here: list[str | Path] = [model for model in cached if name and is_called(model, name)]
    same = {model.rpartition("/")[2] for model in cached}
    here += [m for m in made_models() if is_called(m.name, name) and m.name not in same]
    if len(here) == 1:
        _log.warning("%s: taking %s, which is on this machine.", name, here[0])
        return here[0]
    if here:
        listed = ", ".join(map(str, here))
        raise CheckpointError(f"{name!r} may be one of {listed}.", hint="name one in full")
    known = [_MOVED[name]] if name in _MOVED else models_called(name)
    # For an unknown version or size of a known family: "llama" for "llama3.3".
    family = re.split(r"[^a-z]", name.lower(), maxsplit=1)[0]
    akin = [] if known or len(family) < _SHORTEST_FAMILY else models_called(family)
    fetched = " or ".join(f"`outrider pull {model}`" for model in (known or akin)[:2])
    hint = f"{fetched} fetches one{' of that family' if akin else ''}" if fetched else ""
    raise CheckpointError(
        f"no model {name!r}: there is no such folder, and it is not a hub id of the form org/name.",
        hint=hint
        or f"{_suggest(folder, name)} `outrider pull {FIRST_MODEL}` fetches a published one",
    )


def made_models() -> list[Path]:
    """Folders of published models that scripts/real_model made; a complete one has config.json."""
    cache = cache_folder()
    found = sorted(cache.glob("real/*/config.json")) if cache is not None else []
    return [file.parent for file in found]


def _as_path(name: str) -> Path:
    try:
        folder = Path(name).expanduser()
        folder.exists()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot look for a model at {name[:200]!r}: {error}.") from error
    return folder


def _from_hub(name: str, folder: Path) -> Path:
    # Imported here: a local model needs no hub client, and it takes a moment to load.
    from outrider.models.hub import fetch_shown, local_copy, look

    wanted = given(HubName.parse(name), "name of a model on the hub")
    if (here := local_copy(wanted)) is not None:
        return parts_of(here)[0] if here.is_file() else here
    try:
        model = look(wanted)
    except CheckpointError as error:
        raise CheckpointError(
            f"no model {name!r}: there is no such folder, and as a hub id it is not in the local "
            f"cache: {error}",
            hint=_fetching(name) + _suggest(folder, name),
        ) from error
    return fetch_shown(model)


def _fetching(name: str) -> str:
    """The hint that names the command to fetch a model; empty for Outrider's own names."""
    if name.startswith("outrider/"):
        return ""
    return f"`outrider models pull {name}` where there is a network. "


def _suggest(folder: Path, name: str) -> str:
    """A hint with the nearest valid name: an alias, or a model folder next to the given path."""
    parent = folder.parent
    siblings = sorted(parent.glob("*/config.json"))[:20] if parent.is_dir() else []
    # Heads run with a target only.
    shipped = [*shipped_models(), *(HEAD_ALIASES if name.startswith("outrider/") else ())]
    return did_you_mean(name, [*shipped, *(str(found.parent) for found in siblings)])
