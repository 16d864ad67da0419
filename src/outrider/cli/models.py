"""`outrider models`: lists models, shows their sizes, and fetches them.

`load`, `ollama` and `ping`, which test a model or a server, and `inflate` and `export`, which write
models, are in the lab. Sizes come from config.json alone, without reading weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, TextIO

import torch
from huggingface_hub import constants

from outrider.api.found import num_weight_bytes
from outrider.cache.pages import free_bytes
from outrider.cli.call import Call, needed
from outrider.cli.main import INTERRUPTED
from outrider.cli.options import JsonOption
from outrider.cli.output import Meter, answer, say, screen_table
from outrider.cli.verb_options import PullOptions
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.fields import size
from outrider.core.spec import ModelSpec
from outrider.kernels.operators import DTYPES
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.families import read_config
from outrider.models.gguf.reader import gguf_in
from outrider.models.hub import (
    HubModel,
    HubUnreachableError,
    check_space,
    fetch,
    local_copy,
    look,
    small_copy,
)
from outrider.models.loading import made_models, resolve, shipped_models
from outrider.models.names import (
    ALIASES,
    HEAD_ALIASES,
    HubName,
    cached_models,
    stored_models,
)
from outrider.models.weights import stored_in
from outrider.pairs.catalog import (
    ESTIMATE_TOKENS,
    ModelPair,
    PairedModel,
    get_pair,
    list_pairs,
    models_called,
    partner_of,
)


def list_models(call: Call[JsonOption]) -> int:
    found = local_models()
    records = [asdict(model) | {"folder": str(model.folder)} for model in found]
    toys = dict.fromkeys(ALIASES, "ready (a toy)")
    rows = [
        (m.name, m.family, size(m.num_bytes), m.refusal or toys.get(m.name, _ready(m)))
        for m in found
    ]
    answer(
        call.options, records, screen_table(rows, header=("model", "family", "weights", "state"))
    )
    return 0


def _ready(model: LocalModel) -> str:
    return f"ready; {model.where}" if model.where else "ready"


def inspect_model(call: Call[JsonOption]) -> int:
    name = needed(call, "MODEL")
    facts, notes = describe(read_spec(name)), read_notes(name)
    rows = [
        (key.replace("_", " "), size(value) if key.endswith("_bytes") else value)
        for key, value in facts.items()
    ]
    lines = [screen_table(rows), *(f"note: {note}" for note in notes)]
    answer(call.options, facts | {"notes": notes}, "\n".join(lines))
    return 0


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be loaded without the network, or the reason why it cannot. `where` is the
    model's name in the program that stores it."""

    name: str
    folder: Path
    num_bytes: int
    family: str
    refusal: str | None
    where: str = ""


def local_models() -> list[LocalModel]:
    """Return embedded models, then the hub cache's, then those made here, then others' GGUF."""
    embedded = [_inspect(name, resolve(name)) for name in shipped_models()]
    made = [_inspect(str(folder), folder, folder.name) for folder in made_models()]
    stored = [_inspect(str(file), file, where) for file, where in stored_models()]
    cached = [
        _inspect(one.name, one.snapshot) for one in cached_models() if one.snapshot is not None
    ]
    return [*embedded, *cached, *made, *stored]


def _inspect(name: str, found: Path, where: str = "") -> LocalModel:
    try:
        folder = gguf_in(found) or found
        num_bytes = num_weight_bytes(folder)
    except CheckpointError as error:
        return LocalModel(name, found, 0, "?", str(error), where)
    refusal: str | None = None if num_bytes else "no safetensors weights"
    family = "?"
    try:
        family = open_checkpoint(folder).document(CONFIG).text("model_type")
        read_config(folder)
    except CheckpointError as error:
        refusal = str(error)
    return LocalModel(name, folder, num_bytes, family, refusal, where)


def read_spec(name: str, dtype: str = "auto", *, on_cpu: bool = True) -> ModelSpec:
    """Return the sizes of a model by name; of a hub model, only small files are fetched."""
    folder = small_files(name)
    config = read_config(folder)
    kind = DTYPES.get(config.dtype if dtype == "auto" else dtype, torch.float32)
    spec = config.spec(name, bytes_per_weight=kind.itemsize, bytes_per_kv=kind.itemsize)
    # On CPUs, native kernels compute with the blocks of a GGUF file as they are.
    if dtype != "auto" or not open_checkpoint(folder).is_gguf or not on_cpu:
        return spec
    return replace(spec, stored_bytes=stored_in(folder).held_bytes)


def read_notes(name: str) -> tuple[str, ...]:
    """Return the notes that the model's loader would show."""
    return read_config(small_files(name)).notes


def small_files(name: str, *patterns: str) -> Path:
    """Return the folder of a model with its configuration and the files of `patterns`. For a hub
    model that is not cached, no weights are downloaded. Raises CheckpointError."""
    wanted = HubName.parse(name)
    if wanted is None or name in (*ALIASES, *HEAD_ALIASES) or Path(name).exists():
        return resolve(name)
    try:
        return small_copy(wanted, [CONFIG, *patterns])
    except CheckpointError as error:
        raise CheckpointError(
            f"no model {name!r}: there is no such folder, and {error}", hint=error.hint
        ) from error


def describe(spec: ModelSpec) -> dict[str, Any]:
    """Return the spec and the sizes that follow from it."""
    return asdict(spec) | {
        "weights_bytes": spec.weight_bytes,
        "kv_per_1000_tokens_bytes": 1000 * spec.kv_bytes_per_token,
    }


def memory_fit(spec: ModelSpec, device: torch.device) -> Mapping[str, Any]:
    """Return how many KV tokens, in all layers, and how many texts as long as the window fit into
    the free memory with the weights. On a CPU, local layers only store their own window."""
    free = free_bytes(device)
    left = max(0, free - spec.weight_bytes)
    local = spec.window if spec.local_layers and device.type == "cpu" else spec.max_tokens
    return {
        "model": spec.name,
        "weights_bytes": spec.weight_bytes,
        "kv_per_1000_tokens_bytes": 1000 * spec.kv_bytes_per_token,
        "free_bytes": free,
        "num_tokens_that_fit": left // spec.kv_bytes_per_token,
        "num_windows_that_fit": left // spec.arena_bytes(spec.max_tokens, local),
    }


# `outrider models pull` fetches a target and its draft into the local cache of models; `outrider
# models pairs` lists targets and drafts that work together, with the commands to run them.


class PullBar(Meter):
    """Progress of a download of `total` bytes: a bar on a terminal, else a line per tenth."""

    def __init__(self, out: TextIO, total: int) -> None:
        super().__init__("fetching", total, unit="bytes", out=out, hidden=not total)
        self._out, self._total = out, total
        self._done, self._tenths = 0, 0

    def came(self, num_bytes: int) -> None:
        """Add received bytes; a negative number if some must be fetched again."""
        self._done += num_bytes
        self.reach(self._done)
        tenths = 10 * self._done // self._total if self._total else 0
        if tenths > self._tenths:
            self._tenths = tenths
            if not self.console.is_terminal:
                line = f"{10 * tenths} %  {size(self._done)} of {size(self._total)}"
                print(line, file=self._out, flush=True)


@dataclass(frozen=True, slots=True)
class _Side:
    """A target or its draft. `model` is the hub's entry, `num_bytes` the size to be fetched.
    Without a model nothing is fetched, for the reason `here`."""

    role: str
    name: str
    here: str = ""
    folder: Path | None = None
    model: HubModel | None = None
    num_bytes: int = 0


def pull(call: Call[PullOptions]) -> int:
    options = call.options
    target = _with_revision(needed(call, "TARGET"), options.revision)
    sides = [_find("target", target)]
    draft = _draft(target, options.draft)
    if draft is not None:
        sides.append(_find_draft(draft, known=options.draft == "auto"))
    free = check_space([side.model for side in sides if side.model])
    for line in _intentions(sides, free):
        say(line)
    try:
        folders = _fetch_all(sides)
    except KeyboardInterrupt:
        say("stopped: run the same command again to continue")
        return INTERRUPTED
    command = _command(sides[0].name, draft)
    found = list(zip(sides, folders, strict=True))
    lines = [
        f"{one.role} {one.name}: {one.here or f'fetched into {folder}'}" for one, folder in found
    ]
    if options.draft == "auto" and draft is None:
        hint = f"`outrider draft suggest {target}` says what could draft"
        lines.append(f"no draft is known for it: {hint}")
    record = {"models": [_record(side, folder) for side, folder in found], "command": command}
    answer(options, record, "\n".join([*lines, "", command]))
    return 0


def fetch_missing(name: str) -> None:
    """Fetch a hub model that is not cached, unless offline; other names are the loader's."""
    is_here = Path(name).expanduser().exists() or name in HEAD_ALIASES
    wanted = HubName.parse(name)
    if is_here or constants.HF_HUB_OFFLINE or wanted is None:
        return
    if local_copy(wanted) is None:
        side = _find("model", name)
        if side.model:
            for line in _intentions([side], check_space([side.model])):
                say(line)
        _fetch_all([side])


def _fetch_all(sides: Sequence[_Side]) -> list[Path | None]:
    with PullBar(sys.stderr, sum(side.num_bytes for side in sides)) as bar:
        return [fetch(side.model, bar.came) if side.model else side.folder for side in sides]


def _with_revision(name: str, revision: str | None) -> str:
    if revision is None:
        return name
    if "@" in name:
        raise ConfigError(
            f"{name} names a revision, and --revision another.", hint="leave one of the two out"
        )
    return f"{name}@{revision}"


def _draft(target: str, wanted: str) -> str | None:
    """Return the name of the draft for `target`, None without one."""
    if wanted == "none":
        return None
    if wanted != "auto":
        return wanted
    pair = _partner(target)
    return pair.draft_to_load if pair else None


def _partner(target: str) -> ModelPair | None:
    """The pair of a target, or of the model from which a repository of GGUF files was made."""
    wanted = HubName.parse(target)
    return partner_of(wanted.repo if wanted else target)


def _find_draft(name: str, *, known: bool) -> _Side:
    try:
        return _find("draft", name)
    except CheckpointError as error:
        if known:
            error.hint = f"{error.hint}; or do without this draft: --draft none"
        raise


def _fetched(name: str) -> str:
    """Return a hint with commands that fetch models with the short name `name`, or ""."""
    known = [f"`outrider pull {model}`" for model in models_called(name)[:2] if name]
    return f"{' or '.join(known)} fetches one" if known else ""


def _find(role: str, name: str) -> _Side:
    """Find a model by its name. Raises CheckpointError if no loadable model has this name."""
    if name in (*ALIASES, *HEAD_ALIASES):
        return _Side(role, name, here="ships with outrider")
    if name and Path(name).is_dir():
        return _Side(role, name, here="is a folder on this machine", folder=Path(name))
    wanted = HubName.parse(name)
    if wanted is None:
        raise CheckpointError(
            f"{name!r} is no hub id of the form org/name or org/name:QUANTISATION, and no folder.",
            hint=_fetched(name) or "`outrider models pairs` lists some that work",
        )
    try:
        model = look(wanted)
    except HubUnreachableError:
        folder = local_copy(wanted)
        if folder is None:
            raise
        here = "is here; the hub could not be asked for a newer one"
        return _Side(role, name, here=here, folder=folder)
    # Of a GGUF model the name has the quantisation that was chosen.
    name = str(model.name) if model.is_gguf else name
    if model.missing():
        return _Side(role, name, model=model, num_bytes=model.bytes_to_fetch())
    return _Side(role, name, here="is here already", folder=local_copy(model.name))


def _intentions(sides: Sequence[_Side], free: int) -> Iterator[str]:
    """Yield lines about the files to be fetched; none if there is nothing to fetch."""
    for side in sides:
        if side.model:
            missing, all_files = len(side.model.missing()), len(side.model.files)
            weights = sum(file.num_bytes for file in side.model.files)
            yield (
                f"{side.role} {side.name}: {missing} of {all_files} files to fetch, "
                f"{size(side.num_bytes)}; in memory about {size(weights)}"
            )
    total = sum(side.num_bytes for side in sides)
    if total:
        yield f"to fetch: {size(total)} of the {size(free)} that are free"


def _command(target: str, draft: str | None) -> str:
    words = [f"--target {quote(target)}"]
    if draft is not None:
        words.append(f"--draft {quote(draft)}")
        pair = _partner(target)
        if pair and pair.draft_to_load == draft and pair.drafter != "auto":
            words.append(f"--drafter {pair.drafter}")
    return f"outrider generate {' '.join(words)} PROMPT"


def _record(side: _Side, folder: Path | None) -> dict[str, Any]:
    return {
        "role": side.role,
        "name": side.name,
        "folder": str(folder) if folder else None,
        "commit": side.model.commit if side.model else None,
        "fetched_bytes": side.num_bytes,
        "state": side.here or "fetched",
    }


LOGIN = "gated: accept its licence on the hub, then run `hf auth login`"


def pairs(call: Call[JsonOption]) -> int:
    """Print all pairs, or the details of one."""
    if call.argument is not None:
        pair = get_pair(call.argument)
        answer(call.options, _pair_record(pair), "\n".join(_details(pair)))
        return 0
    found = list_pairs()
    rows = [
        (
            pair.pair_name,
            pair.target_model_id,
            pair.draft_model_id,
            _memory(pair.weights_gb),
            pair.licence,
            _note(pair),
        )
        for pair in found
    ]
    shown = screen_table(rows, header=("pair", "target", "draft", "weights", "licence", "note"))
    more = "Details and the command of one: outrider models pairs NAME"
    answer(call.options, [_pair_record(pair) for pair in found], f"{shown}\n\n{more}")
    return 0


def _details(pair: ModelPair) -> Iterator[str]:
    sides = [("target", pair.target), ("draft", pair.draft)]
    rows = [
        (side, m.model_id, m.dtype, _memory(m.weights_gb), _memory(m.memory_gb(ESTIMATE_TOKENS)))
        for side, m in sides
    ]
    with_kv = f"with KV of {ESTIMATE_TOKENS} tokens"
    total = ("both", "", "", _memory(pair.weights_gb), _memory(pair.memory_gb()))
    yield screen_table(
        [*rows, total], header=(pair.pair_name, "model", "dtype", "weights", with_kv)
    )
    yield f"\n{pair.notes}\nlicence: {pair.licence}\nvocabulary: {_VOCABULARY[pair.vocabulary]}"
    for model_id in dict.fromkeys(model.model_id for _, model in sides if model.gated):
        yield f"{model_id} is {LOGIN}"
    yield f"not supported yet: {pair.refusal}" if pair.refusal else f"\n{pair.command()}"


_VOCABULARY = {
    "same": "shared; any exact sampler",
    "bridge": "not shared; drafts are tokenized again for the target (--drafter bridge)",
}


def _pair_record(pair: ModelPair) -> dict[str, Any]:
    return {
        "pair_name": pair.pair_name,
        "target": _model(pair.target),
        "draft": _model(pair.draft),
        "licence": pair.licence,
        "notes": pair.notes,
        "vocabulary": pair.vocabulary,
        "weights_gb": round(pair.weights_gb, 4),
        "memory_gb": round(pair.memory_gb(), 4),
        "gated": pair.gated,
        "supported": pair.supported,
        "refusal": pair.refusal,
        "command": pair.command() if pair.supported else None,
    }


def _model(model: PairedModel) -> dict[str, Any]:
    return {
        "model_id": model.model_id,
        "dtype": model.dtype,
        "weights_gb": model.weights_gb,
        "memory_gb": round(model.memory_gb(ESTIMATE_TOKENS), 4),
        "gated": model.gated,
    }


def _memory(gigabytes: float) -> str:
    return size(gigabytes * 1e9)


def _note(pair: ModelPair) -> str:
    bridge = f"; needs --drafter {pair.drafter}" if pair.drafter != "auto" else ""
    gated = "; gated, needs `hf auth login`" if pair.gated else ""
    refusal = f"; not supported yet: {pair.refusal}" if pair.refusal else ""
    return f"{pair.notes}{bridge}{gated}{refusal}"
