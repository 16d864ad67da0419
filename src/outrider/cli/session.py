"""Loading a model from resolved settings, streaming replies, their structure, and logging; for
several verbs.

A model may be loaded as several engines in child processes. Errors in their options are reported
before anything is loaded.

Log events go to stderr, as lines for people or as JSON objects for programs. A JSON line has `time`
(UTC, ISO 8601), `level`, `logger` and `message`, and `error` with the traceback if there is one.
"""

from __future__ import annotations

import datetime
import json
import logging
import signal
import sys
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, cast

from outrider import __version__
from outrider.cli.output import say
from outrider.core.config import EngineConfig
from outrider.core.early import load_library, pages_for
from outrider.core.env import variables_with
from outrider.core.errors import (
    VARIABLES_OF_OTHERS,
    ConfigError,
    MachineError,
    OutriderError,
    Wordless,
    hear_compilers,
    notes_on,
)
from outrider.core.fields import split
from outrider.core.files import FileKind, read_text
from outrider.core.params import ADVISED
from outrider.core.plugins import AUTO, OFF, drafter_named, install_command
from outrider.core.settings import DEFAULT, Chosen, ProgramConfig, Resolved
from outrider.pairs.catalog import is_called

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.api.result import GenerationResult, TextEvent
    from outrider.api.structure import StructureOptions
    from outrider.api.tokenizer import Tokenizer
    from outrider.cli.options import ReplicasOption, StructureOption
    from outrider.cli.output import Painter
    from outrider.core.draft import JobTrace, Origin
    from outrider.plugins.replicas import EnginePool
    from outrider.server.port import Engines

_OURS = "outrider"


def start_logging(program: ProgramConfig, *, wordless: bool = False) -> None:
    """Start logging, unless configured already. `wordless` leaves out errors' messages."""
    if any(handler.get_name() == _OURS for handler in logging.root.handlers):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(_OURS)
    if wordless:
        handler.addFilter(Wordless())
    text = logging.Formatter("outrider: %(message)s")
    handler.setFormatter(JsonLines() if program.log_format == "json" else text)
    logging.basicConfig(level=program.log_level.upper(), handlers=[handler])
    if program.log_level != "error":
        hear_compilers()
    for note in notes_on(variables_with(VARIABLES_OF_OTHERS)):
        logging.getLogger(__name__).warning(note)


class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object per event, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        event = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["error"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False)


# Loggers whose warnings are also in the result's notes, which are printed after the text.
TOLD_BY_NOTES = (
    *("outrider.control.goodput", "outrider.control.heuristics"),
    "outrider.engine.drafting",
)


def open_llm(
    resolved: Resolved,
    *,
    drafter: str | None = None,
    on_job: Callable[[JobTrace], None] | None = None,
    chats: bool = False,
    details: bool = False,
) -> LLM:
    """Load the settings' model and print its notes, all lines of them with `details`. `drafter`
    overrides the setting; `on_job` gets every job. With `chats`, a chat template is required
    before loading."""
    load_library()
    from outrider.models.gguf.packing import packer_for

    target, draft, engine = to_load(resolved)
    with pages_for(target if engine.device in ("auto", "cpu") else "", packer_for(engine)):
        tokenizer = _tokenizer(engine.tokenizer or target)
        if chats:
            _begin_template(engine, target, tokenizer)
        if drafter is not None:
            engine = replace(engine, drafter=drafter)

        from outrider.api.llm import LLM

        llm = LLM(target, draft=draft, config=engine, on_job=on_job)
    if drafter is None:
        _say_notes(llm.notes, details=details)
    return llm


def _tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer of a file or folder, read while PyTorch's library is loaded; None for
    another name. What is wrong with it is reported when the model is loaded."""
    from outrider.api.tokenizer import Tokenizer
    from outrider.models.gguf.reader import gguf_in, parts_of
    from outrider.models.names import ALIASES

    path = None if name in ALIASES else _path(name)
    with suppress(OutriderError, OSError):
        if path is not None:
            return Tokenizer.load(parts_of(path)[0] if path.is_file() else gguf_in(path) or path)
    return None


def _begin_template(engine: EngineConfig, target: str, tokenizer: Tokenizer | None) -> None:
    """Start the process that renders chat templates. Raises CheckpointError if there is none."""
    if engine.chat_template:
        from outrider.api.chat_template import begin_helper

        begin_helper()
        return
    if tokenizer is None:
        from outrider.api.tokenizer import Tokenizer
        from outrider.models.loading import resolve

        tokenizer = Tokenizer.load(resolve(engine.tokenizer or target))
    tokenizer.templates.pick().begin()


def _say_notes(notes: Iterable[str], *, details: bool = False) -> None:
    """Print notes on a model; further lines of a note have details."""
    for note in notes:
        first, _, more = note.partition("\n")
        say(f"note: {first}")
        if more and details:
            say(f"  {more}")


def to_load(resolved: Resolved) -> tuple[str, str | None, EngineConfig]:
    """Return target, draft and configuration of the settings; missing models are fetched."""
    program = resolved.program()
    start_logging(program)
    _check_flags(resolved)
    if sys.stderr.isatty():
        for name in TOLD_BY_NOTES:
            logging.getLogger(name).setLevel(logging.ERROR)
    engine = without_draft(resolved.engine()) if program.draft == "none" else resolved.engine()
    draft = None if program.draft in ("auto", "none") else program.draft
    fetch_missing(program.target, draft)
    return program.target, draft, engine


def check_models(target: str, draft: str) -> None:
    """Check the names of models before a command says what it does. Raises CheckpointError if there
    is no such model. Local models are found without importing the code that runs models; hub ids
    are looked up later, when they are fetched."""
    drafts = () if draft in ("auto", "none") else _each(draft)
    for name in (target, *drafts):
        if not _is_model(name):
            from outrider.models.families import read_config
            from outrider.models.loading import resolve

            folder = resolve(name)
            if name == target:
                read_config(folder)


def _is_model(name: str) -> bool:
    """True if `name` is known to be a model, or may be a hub id."""
    from outrider.models.gguf.reader import is_gguf
    from outrider.models.names import ALIASES, HEAD_ALIASES, HubName, cached_models

    if name in (*ALIASES, *HEAD_ALIASES):
        return True
    if (path := _path(name)) is not None:
        return is_gguf(path) or (path / "config.json").is_file() or any(path.glob("*.gguf"))
    is_path = name.startswith(("/", ".", "~", "outrider/")) or name.endswith(".gguf")
    may_be_id = not is_path and HubName.parse(name) is not None
    return may_be_id or any(is_called(model.name, name) for model in cached_models())


def _path(name: str) -> Path | None:
    """Return the file or folder called `name`; None if there is none."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError):
        return None


def _each(name: str) -> Sequence[str]:
    """Return the names in `name`: one if it is a file, else those between commas."""
    return split(name) if _path(name) is None else (name,)


def fetch_missing(*names: str | None) -> None:
    """Fetch hub models that are not on this machine, with a progress bar."""
    for name in names:
        for one in (name,) if name is None else _each(name):
            _fetch_one(one)


def _fetch_one(name: str | None) -> None:
    if name is None or "/" not in name or name.startswith("outrider/"):
        return
    # The hub's client takes long to import, and a file on this machine does not need it.
    if _path(name) is None:
        from outrider.cli.models import fetch_missing as fetch

        fetch(name)


def _check_flags(resolved: Resolved) -> None:
    """Refuse --draft with a --drafter that ignores it. A flag may override a file, which is no
    mistake. Raises ConfigError."""
    draft, drafter = resolved.chosen["draft"], resolved.chosen["drafter"]
    named = draft.value not in ("auto", "none") and draft.origin == draft.setting.flag
    if named and str(draft.value).isdecimal():
        raise ConfigError(
            f"--draft names a model, got {draft.value!r}.",
            hint=f"`outrider generate PROMPT --k {draft.value}` drafts this many tokens per round",
        )
    name = str(drafter.value)
    modelless = name != AUTO and not drafter_named(name).reads_draft
    if named and modelless and drafter.origin == drafter.setting.flag:
        raise ConfigError(
            f"--draft names a model, and --drafter {drafter.value} reads none.",
            hint="leave one of the two out",
        )


def without_draft(engine: EngineConfig) -> EngineConfig:
    """Return the configuration without a draft model: plain decoding, unless another drafter is
    named. Raises ConfigError for a drafter that needs a draft."""
    if engine.drafter == AUTO:
        return replace(engine, drafter=OFF)
    kind = drafter_named(engine.drafter)
    if kind.folder is not None and not kind.in_target:
        raise ConfigError(
            f"--drafter {engine.drafter} needs a draft model or heads, and --draft is none.",
            hint="name a folder with --draft, or use --drafter ngram",
        )
    return replace(engine, drafter=kind.without_draft or engine.drafter)


def made_greedy(resolved: Resolved) -> Resolved:
    """Return the settings with temperature 0 and without the checkpoint's recommendations. Raises
    ConfigError if the command line has a temperature."""
    chosen = dict(resolved.chosen)
    temperature = chosen["temperature"]
    if temperature.origin == temperature.setting.flag and temperature.value:
        raise ConfigError("--greedy is temperature 0.", hint="leave --greedy or --temperature out")
    for name in ADVISED:
        if name == "temperature" or chosen[name].origin == DEFAULT:
            item = chosen[name].setting
            chosen[name] = Chosen(item, item.default, "--greedy")
    return Resolved(chosen)


def sampling_line(values: Mapping[str, object], advised: Collection[str]) -> str:
    """Return the sampling in one line; the parameters in `advised` are the checkpoint's choice."""
    if not values["temperature"]:
        return "sampling: greedy"
    text = ", ".join(f"{name} {value}" for name, value in values.items())
    why = ", as the checkpoint advises; --greedy switches it off" if advised else ""
    return f"sampling: {text}{why}"


@dataclass(slots=True)
class Reply:
    """A reply that was shown: its result, and the origins of its tokens."""

    result: GenerationResult
    seen: set[Origin]


def show(
    llm: LLM,
    events: Iterator[TextEvent],
    painter: Painter | None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Reply:
    """Write `events` as they come, to their end or until `stop()` is true. The result's notes are
    left to `show_notes`, after the last line of the text."""
    seen: set[Origin] = set()
    with closing(cast("Generator[TextEvent]", events)) as stream:
        for event in stream:
            seen.update(event.origins)
            if painter is not None:
                painter.pieces(event.pieces, event.origins)
            if stop():
                break
    return Reply(llm.last_result, seen)


def show_notes(results: Iterable[GenerationResult]) -> None:
    """Print the notes of results on stderr, each sentence once."""
    for note in dict.fromkeys(note for result in results for note in result.notes):
        say(f"note: {note}")


def run_record(llm: LLM, resolved: Resolved) -> dict[str, object]:
    """Return what a result depends on besides the prompt: the user's settings, and the kernels."""
    kernels = {choice.op: choice.name for choice in llm.kernels.choices}
    return {"version": __version__, "settings": resolved.decided(), "kernels": kernels}


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; a second Ctrl-C is an exception.

    An exception in the middle of a round or a step would leave it in an inconsistent state.
    """
    pressed = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def structure_of(flags: StructureOption) -> StructureOptions:
    """Return the structure of `--schema`, `--json-object`, `--regex`, `--choice` and `--grammar`,
    checked later. Raises ConfigError for bad files."""
    found: StructureOptions = {}
    if flags.schema is not None:
        found["schema"] = _text_of(flags.schema, "--schema", signs="{")
    if flags.json_object:
        found["json"] = True
    if flags.regex is not None:
        found["regex"] = flags.regex
    if flags.choice:
        found["choices"] = flags.choice
    if flags.grammar is not None:
        found["grammar"] = _text_of(flags.grammar, "--grammar", signs=":")
    return found


def _text_of(given: str, flag: str, *, signs: str) -> str:
    """Return the file's content, or `given` itself if it has `signs`. Raises ConfigError."""
    path = Path(given)
    try:
        is_file = path.exists()
    except OSError:  # too long for a file's name
        is_file = False
    if not is_file and signs in given:
        return given
    try:
        return read_text(path, FileKind.GRAMMAR)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{flag} {given}: cannot be read: {reason}.",
            hint=f"give a file, or write what it would hold: {flag} '{_EXAMPLES[flag]}'",
        ) from None


_EXAMPLES = {"--schema": '{"type": "object"}', "--grammar": 'start: "yes" | "no"'}


def engines_of(options: ReplicasOption, config: EngineConfig) -> Engines:
    """Return the engines of the options. Raises ConfigError for invalid devices or numbers."""
    from outrider.kernels.native.cpu import allowed_cores
    from outrider.server.port import Engines

    devices = [name.strip() for name in options.devices.split(",") if name.strip()]
    found = Engines.of(options.replicas, devices, config)
    num_cores = len(allowed_cores())
    if len(found) > num_cores:
        say(f"note: {len(found)} engines share {num_cores} cores; each alone would be faster")
    return found


def opened(
    options: ReplicasOption, resolved: Resolved
) -> tuple[LLM | EnginePool, dict[str, object]]:
    """Open the model of the settings, in this process or as several engines in child processes.
    Return it with its entry in the record of a run."""
    if options.replicas == 1 and not options.devices:
        llm = open_llm(resolved)
        return llm, run_record(llm, resolved)
    if find_spec("msgspec") is None:
        raise MachineError("several engines need msgspec.", hint=install_command("server"))
    from outrider.plugins.replicas import EnginePool

    engines = engines_of(options, resolved.engine())
    target, draft, config = to_load(resolved)
    pool = EnginePool.of(target, draft, config, engines)
    _say_notes(pool.card.notes)
    record: dict[str, object] = {"version": __version__, "settings": resolved.decided()}
    return pool, record | {"engines": engines.described, "numerics": pool.card.numerics}
