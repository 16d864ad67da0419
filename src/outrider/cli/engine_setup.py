"""What `bench engines` and `bench load` have in common: models, prompts, a folder, a page."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.api.llm import LLM
from outrider.bench import figure_style
from outrider.bench.engines.plan import Contestant, Workload, line_up
from outrider.bench.engines.record import REQUESTS, csv_text
from outrider.bench.engines.samples import Taken, run
from outrider.bench.fingerprint import machine, weights_digest
from outrider.bench.pages import Page
from outrider.bench.provenance import write_text
from outrider.cli.output import table
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.params import SamplingParams
from outrider.core.settings import DEFAULT, Resolved
from outrider.models.loading import pick_device, resolve
from outrider.pairs.catalog import draft_of


def engine_settings(resolved: Resolved, *, most_in_flight: int) -> EngineConfig:
    """As settings say; a batch holds all that will be in flight unless its size was set."""
    engine = resolved.engine()
    if resolved.chosen["batch_size"].origin == DEFAULT:
        engine = replace(engine, batch_size=most_in_flight)
    return engine


def sampling(resolved: Resolved, max_tokens: int) -> SamplingParams:
    params = resolved.sampling()
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))


def contestants(
    names: Sequence[str], resolved: Resolved, engine: EngineConfig
) -> tuple[list[Contestant], dict[str, LLM]]:
    """Every engine loaded, and the LLMs by its name. Raises OutriderError if none can run."""
    program = resolved.program()
    draft = None if program.draft in ("auto", "none") else program.draft
    if program.draft == "none" and engine.drafter == "auto":
        engine = replace(engine, drafter="none")
    llms: dict[str, LLM] = {}
    errors: list[OutriderError] = []

    def open_one(contestant: Contestant) -> None:
        try:
            llm = LLM(
                program.target,
                draft=draft if contestant.config.drafter != "none" else None,
                config=contestant.config,
                on_job=contestant.jobs.append,
            )
        except OutriderError as error:
            errors.append(error)
            raise
        llms[contestant.name] = llm
        contestant.server, contestant.exact = llm, llm.exact
        contestant.facts = {
            "drafter": llm.drafter,
            "kernels": {choice.op: choice.name for choice in llm.kernels.choices},
            "row_exact_kernels": llm.kernels.exact,
            "notes": list(llm.notes),
        }

    own = resolved.chosen["controller"].origin != DEFAULT
    found = line_up(names, engine, open_one, own_controller=own)
    if not llms:
        raise errors[0]
    for note in dict.fromkeys(note for llm in llms.values() for note in llm.notes):
        say(f"note: {note}")
    for contestant in found:
        if contestant.reason is not None:
            say(f"note: {contestant.name} cannot run here: {contestant.reason}")
    return found, llms


def origins(resolved: Resolved) -> dict[str, object]:
    """Which models and machine the numbers are of."""
    program = resolved.program()
    draft = {"auto": draft_of(program.target), "none": None}.get(program.draft, program.draft)
    names = {"target": program.target, **({"draft": draft} if draft else {})}
    return {
        "machine": machine(resolved.engine().device),
        "models": names,
        "weights": {side: weights_digest(resolve(name)) for side, name in names.items()},
        "settings": resolved.decided(),
    }


def folder_of(kind: str, given: str | None, resolved: Resolved) -> Path:
    """Where results go; a new folder, unless one was named. Raises ConfigError if it has some."""
    if given is not None:
        folder = Path(given)
        if (folder / "results.json").exists():
            raise ConfigError(
                f"{folder} has results already, and nothing is overwritten.",
                hint=f"choose another folder, such as --output-dir {given}-2",
            )
        return folder
    today = datetime.date.today().isoformat()
    device = pick_device(resolved.engine().device).type
    target = resolved.program().target
    slug = re.sub(r"[^\w.-]+", "-", Path(target).name or target).strip("-.") or "model"
    stem = f"{today}-{device}-{slug}-{kind}"
    taken = (n for n in range(1, 10_000) if not (Path("results") / _numbered(stem, n)).exists())
    return Path("results") / _numbered(stem, next(taken))


def _numbered(stem: str, number: int) -> str:
    return stem if number == 1 else f"{stem}-{number}"


def write_requests(folder: Path, csv: str | None, rows: Sequence[Mapping[str, object]]) -> None:
    """A row a request, into the folder and, if it is named, another file."""
    text = csv_text(rows)
    for path in (folder / REQUESTS, *([Path(csv)] if csv else [])):
        write_text(path, text)


def print_page(page: Page) -> None:
    print(page.title, end="\n\n")
    for section in page.sections:
        print("\n".join([section.title, *section.text]))
        if section.rows:
            print(table(section.rows, header=section.header))
        for point in section.points:
            print(point)
        print()


def draw(wanted: bool, drawing: Callable[[], Sequence[Path]]) -> Sequence[Path]:
    """What `drawing` writes, if figures are wanted and can be drawn."""
    if not wanted:
        return []
    reason = figure_style.why_not()
    if reason is not None:
        say(f"note: {reason}")
        return []
    return drawing()


def pictures(folder: Path, drawn: Sequence[Path]) -> list[tuple[str, str]]:
    """Titles and paths, from the page on, of those for light pages."""
    return [
        (path.stem.replace("_", " "), path.relative_to(folder).as_posix())
        for path in drawn
        if path.suffix == ".svg" and not path.stem.endswith("-dark")
    ]


def measure(plan: Workload, found: Sequence[Contestant]) -> tuple[list[Taken], bool]:
    """What was taken, and whether that is everything or an interrupt came. With a progress bar on
    stderr, where that is a terminal."""
    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("visits, left:"),
        TimeRemainingColumn(),
    ]
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    taken: list[Taken] = []
    with Progress(*columns, console=console, disable=hidden) as progress:
        task = progress.add_task("engines", total=len(plan.visits()))
        try:
            for visit in run(plan, found):
                taken += visit
                progress.advance(task)
        except KeyboardInterrupt:
            return taken, False
    return taken, True


def say(text: str) -> None:
    print(text, file=sys.stderr)
