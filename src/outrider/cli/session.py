"""From resolved settings to a loaded model and a streamed reply; shared by generate and chat.

Events of the program go to stderr, as lines for people or as JSON objects for programs. A JSON line
has `time` (UTC, ISO 8601), `level`, `logger` and `message`, and `error` with the traceback where an
event carries one.
"""

from __future__ import annotations

import datetime
import json
import logging
import signal
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, cast

from outrider import __version__
from outrider.cli.output import say
from outrider.core.config import EngineConfig
from outrider.core.drafter_kinds import AUTO, OFF, drafter_named
from outrider.core.env import variables_with
from outrider.core.errors import ConfigError
from outrider.core.foreign import VARIABLES_OF_OTHERS, notes_on
from outrider.core.logs import Wordless, hear_compilers
from outrider.core.params import ADVISED
from outrider.core.settings import DEFAULT, Chosen, ProgramConfig, Resolved

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.api.result import GenerationResult, TextEvent
    from outrider.cli.paint import Painter
    from outrider.core.budget import JobTrace
    from outrider.core.draft import Origin


_OURS = "outrider"


def start_logging(program: ProgramConfig, *, wordless: bool = False) -> None:
    """Log from `log_level` on, unless the caller's program logs already, or we do. `wordless`
    leaves out what errors say."""
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
    """One object an event, on one line."""

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


# What these warn of in the middle of a text, the result's notes say after it.
TOLD_BY_NOTES = (
    *("outrider.control.goodput", "outrider.control.watchdog"),
    "outrider.engine.drafting",
)


def open_llm(
    resolved: Resolved,
    *,
    drafter: str | None = None,
    on_job: Callable[[JobTrace], None] | None = None,
    chats: bool = False,
) -> LLM:
    """Load what the settings name; `drafter` overrides theirs, `on_job` hears of every job. Notes
    go to stderr. A model that `chats` must have a template, or is refused before it is loaded."""
    target, draft, engine = to_load(resolved)
    if chats and not engine.chat_template:
        from outrider.api.tokenizer import Tokenizer
        from outrider.models.loading import resolve

        Tokenizer.load(resolve(engine.tokenizer or target)).templates.pick()
    if drafter is not None:
        engine = replace(engine, drafter=drafter)

    from outrider.api.llm import LLM

    llm = LLM(target, draft=draft, config=engine, on_job=on_job)
    if drafter is None:
        for note in llm.notes:
            say(f"note: {note}")
    return llm


def to_load(resolved: Resolved) -> tuple[str, str | None, EngineConfig]:
    """Target, draft and configuration that the settings name, all of them here."""
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


def fetch_missing(*names: str | None) -> None:
    """Fetch what is on the hub and not here, and show how far it is."""
    for name in names:
        if name is not None and "/" in name and not name.startswith("outrider/"):
            from outrider.cli.pull import fetch_missing as fetch

            fetch(name)


def _check_flags(resolved: Resolved) -> None:
    """A draft model beside a drafter that reads none: refused where both are on the command line,
    for the one would be ignored. A flag may override a file, which is not seen as a mistake."""
    draft, drafter = resolved.chosen["draft"], resolved.chosen["drafter"]
    named = draft.value not in ("auto", "none") and draft.origin == draft.setting.flag
    if named and str(draft.value).isdecimal():
        raise ConfigError(
            f"--draft names a model, got {draft.value!r}.",
            hint=f"`outrider generate PROMPT --k {draft.value}` drafts so many tokens a round",
        )
    name = str(drafter.value)
    modelless = name != AUTO and not drafter_named(name).reads_draft
    if named and modelless and drafter.origin == drafter.setting.flag:
        raise ConfigError(
            f"--draft names a model, and --drafter {drafter.value} reads none.",
            hint="leave one of the two out",
        )


def without_draft(engine: EngineConfig) -> EngineConfig:
    """No draft model: plain decoding, unless another drafter was asked for by name."""
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
    """The same with temperature 0 and nothing that a checkpoint advises. Raises ConfigError where
    the command line names a temperature."""
    chosen = dict(resolved.chosen)
    temperature = chosen["temperature"]
    if temperature.origin == temperature.setting.flag and temperature.value:
        raise ConfigError("--greedy is temperature 0.", hint="leave --greedy or --temperature out")
    for name in ADVISED:
        if name == "temperature" or chosen[name].origin == DEFAULT:
            item = chosen[name].setting
            chosen[name] = Chosen(item, item.default, "--greedy")
    return Resolved(chosen)


def told_sampling(values: Mapping[str, object], advised: Collection[str]) -> str:
    """How texts are drawn, in one line; the names in `advised` are the checkpoint's choice."""
    if not values["temperature"]:
        return "sampling: greedy"
    told = ", ".join(f"{name} {value}" for name, value in values.items())
    why = ", as the checkpoint advises; --greedy switches it off" if advised else ""
    return f"sampling: {told}{why}"


@dataclass(slots=True)
class Reply:
    """A reply as it was shown: its result, and the origins that occurred."""

    result: GenerationResult
    seen: set[Origin]


def show(
    llm: LLM,
    events: Iterator[TextEvent],
    painter: Painter | None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Reply:
    """Read `events` to their end, or to the first one after `stop` became true, painting them. What
    the result's notes say is left to `tell_notes`, once the last line of the text has ended."""
    seen: set[Origin] = set()
    with closing(cast("Generator[TextEvent]", events)) as stream:
        for event in stream:
            seen.update(event.origins)
            if painter is not None:
                painter.pieces(event.pieces, event.origins)
            if stop():
                break
    return Reply(llm.last_result, seen)


def tell_notes(results: Iterable[GenerationResult]) -> None:
    """What happened to requests on their way, each sentence once, on stderr."""
    for note in dict.fromkeys(note for result in results for note in result.notes):
        say(f"note: {note}")


def run_record(llm: LLM, resolved: Resolved) -> dict[str, object]:
    """What a result depends on beside the prompt: settings decided by somebody, and kernels."""
    kernels = {choice.op: choice.name for choice in llm.kernels.choices}
    return {"version": __version__, "settings": resolved.decided(), "kernels": kernels}


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """Turn the first Ctrl-C into an answer of the yielded function; a second one is an exception.

    An exception in the middle of a round or of a step would leave it between two states.
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
