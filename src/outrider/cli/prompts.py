"""`outrider prompts`: how long the benchmark prompts are, and a set of them as a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from outrider.api.tokenizer import Tokenizer
from outrider.bench.dataset import PER_DOMAIN, PromptDataset
from outrider.bench.published import PUBLISHED, published_texts
from outrider.bench.workloads import builtin_texts
from outrider.cli.call import Call
from outrider.cli.options import PromptsOptions
from outrider.cli.output import check_writable, json_line, table
from outrider.core.errors import ConfigError, MachineError
from outrider.models.loading import resolve


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
    if options.json:
        record = {"tokenizer": found.tokenizer, "domains": [asdict(one) for one in stats]}
        print(json_line(record))
    else:
        print(f"tokens by the tokenizer of {found.tokenizer}")
        rows = [(s.domain, s.source, s.n, s.min, f"{s.mean:.1f}", s.max) for s in stats]
        print(table(rows, header=("domain", "source", "n", "min", "mean", "max")))
    for name, saved in ((options.output, found), (options.tiny_output, found.tiny())):
        if name:
            saved.save(Path(name))
            print(f"saved {len(saved)} prompts to {name}", file=_stream(options))
    return 0


def _build(options: PromptsOptions, count: Callable[[str], int]) -> PromptDataset:
    texts: dict[str, list[str]] = {}
    sources: dict[str, str] = {}
    for domain in dict.fromkeys(word.strip() for word in options.domains.split(",")):
        texts[domain] = builtin_texts(domain)[:PER_DOMAIN]
        sources[domain] = "builtin"
        if options.source == "hub":
            try:
                texts[domain] = published_texts(domain, PER_DOMAIN, count)
                sources[domain] = PUBLISHED[domain].repo
            except MachineError as error:
                print(f"note: {domain}: built-in prompts, since {error}", file=sys.stderr)
    return PromptDataset.build(texts, count, tokenizer=options.tokenizer, sources=sources)


def _stream(options: PromptsOptions) -> TextIO:
    """What is said beside JSON goes to stderr, so that the output stays one object."""
    return sys.stderr if options.json else sys.stdout
