"""`outrider bench quality`: does speculation keep the text, and what do formats and lossy rules
change of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from outrider.api.tokenizer import Tokenizer
from outrider.cli.call import Call
from outrider.cli.main import INTERRUPTED
from outrider.cli.output import Meter, answer, say
from outrider.cli.session import start_logging
from outrider.core.errors import ConfigError, MachineError
from outrider.core.fields import words_of
from outrider.core.files import FileKind, read_text
from outrider.models.loading import resolve
from outrider.plugins.compat.wrapper import load_wrapper
from outrider.plugins.measure.turns import provenance
from outrider_lab.bench.quality import (
    FORMATS,
    QUANTISED,
    RULES,
    FormatRow,
    Nats,
    Quality,
    RuleRow,
    RuleStudy,
    SelfDrafts,
    compare_formats,
    compare_rules,
    load_judge,
    read,
    sections,
    windows_of,
)
from outrider_lab.bench.workload import builtin_texts
from outrider_lab.cli import engine_setup
from outrider_lab.cli.bench_options import QualityOptions
from outrider_lab.cli.engine_setup import Subject, subject
from outrider_lab.measure.store import Page

WINDOW_TOKENS = 256
_ALL, _NONE = "all", "none"
# What a wrapper's arena holds of one text.
_MOST_TOKENS = 4096

T = TypeVar("T")


def quality(call: Call[QualityOptions]) -> int:
    start_logging(call.resolved.program())
    options = call.options
    forms = _words("--formats", options.formats, FORMATS)
    rules = _words("--rules", options.rules, RULES)
    if not forms and not rules:
        raise ConfigError("neither a format nor a rule to check.", hint="--rules all")
    about = subject(call.resolved, most_in_flight=8)
    prompts = _prompts(options)
    formats: list[FormatRow] = []
    kept: list[RuleRow] = []
    whole = True
    try:
        _collect("formats", len(forms), _formats(call, about, forms, prompts), formats)
        _collect("rules", len(rules) + bool(rules), _rules(call, about, rules, prompts), kept)
    except KeyboardInterrupt:
        whole = False
        say("\ninterrupted: below is what was measured until then")
    _show(call, about, Quality(formats, kept), whole=whole)
    if not whole:
        return INTERRUPTED
    return 1 if any(row.broken for row in kept) else 0


def _words(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    if text.strip() in (_ALL, _NONE):
        return tuple(known) if text.strip() == _ALL else ()
    return engine_setup.chosen_words(flag, text, known)


def _prompts(options: QualityOptions) -> list[str]:
    names = words_of("--domains", options.domains, hint="--domains code,maths")
    return [text for name in names for text in builtin_texts(name)[: options.prompts]]


def _formats(
    call: Call[QualityOptions], about: Subject, forms: Sequence[str], prompts: Sequence[str]
) -> Iterable[FormatRow]:
    options = call.options
    texts = prompts if options.text is None else [_file(Path(options.text))]
    target = about.models.target
    ids = Tokenizer.load(resolve(target)).encode_batch(texts)
    windows = windows_of(ids, WINDOW_TOKENS, options.text_tokens)
    if not windows:
        raise ConfigError(
            "the text has no two tokens, so there is no perplexity.", hint="name a longer --text"
        )
    load = partial(load_judge, target, device=about.engine.device)
    copies = _words("--self-drafts", options.self_drafts, QUANTISED)
    drafts = SelfDrafts(
        target=target,
        engine=about.engine,
        params=engine_setup.sampling(call.resolved, options.max_tokens),
        prompts=prompts,
        copies=copies,
    )
    return drafts.measured(compare_formats(load, forms, windows))


def _rules(
    call: Call[QualityOptions], about: Subject, rules: Sequence[str], prompts: Sequence[str]
) -> Iterable[RuleRow]:
    if not rules:
        return ()
    target, engine = about.models.target, about.engine
    judge, _ = load_wrapper(target, engine.dtype, engine.device, quantise=engine.quantise)

    def nats(prompt: Sequence[int], written: Sequence[int]) -> Nats:
        ids = [*prompt, *written][:_MOST_TOKENS]
        return read(judge, ids, max(len(prompt), 1))

    study = RuleStudy(
        target=target,
        draft=about.models.draft,
        engine=engine,
        params=engine_setup.sampling(call.resolved, call.options.max_tokens),
        prompts=prompts,
        read=nats,
    )
    return compare_rules(study, rules)


def _file(path: Path) -> str:
    try:
        return read_text(path, FileKind.PROMPTS)
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8.", hint="convert it first") from None


def _collect(title: str, total: int, rows: Iterable[T], into: list[T]) -> None:
    """Fill `into` row by row, so that an interrupt keeps those before it; with a bar on stderr,
    where that is a terminal."""
    with Meter(title, total, unit="rows", hidden=not total) as meter:
        for row in rows:
            into.append(row)
            meter.step()


def _show(call: Call[QualityOptions], about: Subject, found: Quality, *, whole: bool) -> None:
    record: dict[str, object] = {
        "benchmark": "quality",
        "provenance": provenance(),
        "complete": whole,
        **engine_setup.origins(about, call.resolved),
        "max_tokens": call.options.max_tokens,
        **found.to_record(),
    }
    page = Page(f"Quality, {about.name}", list(sections(found)))
    answer(call.options, record, engine_setup.page_text(page))
