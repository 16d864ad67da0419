"""`outrider bench prompts`: how long the benchmark prompts are, and a set of them as a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from outrider.api.tokenizer import Tokenizer
from outrider.cli.call import Call
from outrider.cli.output import answer, check_writable, screen_table
from outrider.core.errors import ConfigError, MachineError, did_you_mean
from outrider.models.loading import resolve
from outrider_lab.bench.published import PUBLISHED, published_texts, questions_of
from outrider_lab.bench.workload import PER_DOMAIN, PromptDataset, builtin_texts
from outrider_lab.cli.verb_options import PromptsOptions

SOURCES = ("builtin", "hub")


def prompts(call: Call[PromptsOptions]) -> int:
    options = call.options
    outputs = [Path(name) for name in (options.output, options.tiny_output) if name]
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise ConfigError("--output and --tiny-output name one file.", hint="name two files")
    for path in outputs:
        check_writable(path)
    tokenizer = Tokenizer.load(resolve(options.tokenizer))
    found = _build(options, lambda text: len(tokenizer.encode(text)))
    stats = found.statistics()
    record = {"tokenizer": found.tokenizer, "domains": [asdict(one) for one in stats]}
    rows = [(s.domain, s.source, s.n, s.min, f"{s.mean:.1f}", s.max) for s in stats]
    shown = screen_table(rows, header=("domain", "source", "n", "min", "mean", "max"))
    answer(options, record, f"tokens by the tokenizer of {found.tokenizer}\n{shown}")
    for name, saved in ((options.output, found), (options.tiny_output, found.tiny())):
        if name:
            saved.save(Path(name))
            print(f"saved {len(saved)} prompts to {name}", file=_stream(options))
    return 0


def _build(options: PromptsOptions, count: Callable[[str], int]) -> PromptDataset:
    texts: dict[str, list[str]] = {}
    sources: dict[str, str] = {}
    own = None if options.source in SOURCES else questions_of(_file(options.source))
    for domain in dict.fromkeys(word.strip() for word in options.domains.split(",")):
        if own is None:
            texts[domain], sources[domain] = _known(domain, options, count)
        elif domain in own:
            texts[domain], sources[domain] = own[domain][:PER_DOMAIN], options.source
        else:
            raise ConfigError(
                f"{options.source} has no {domain}.", hint=f"--domains {','.join(own)}"
            )
    return PromptDataset.build(texts, count, tokenizer=options.tokenizer, sources=sources)


def _known(
    domain: str, options: PromptsOptions, count: Callable[[str], int]
) -> tuple[list[str], str]:
    """The prompts of a domain, and where they are from."""
    builtin = builtin_texts(domain)[:PER_DOMAIN]
    if options.source == "hub":
        try:
            return published_texts(domain, PER_DOMAIN, count), PUBLISHED[domain].repo
        except MachineError as error:
            print(f"note: {domain}: built-in prompts, since {error}", file=sys.stderr)
    return builtin, "builtin"


def _file(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            f"--source: {name!r} is neither {' nor '.join(SOURCES)}, and no such file.",
            hint=did_you_mean(name, SOURCES),
        )
    return path


def _stream(options: PromptsOptions) -> TextIO:
    """What is said beside JSON goes to stderr, so that the output stays one object."""
    return sys.stderr if options.json else sys.stdout
