"""What `bench engines` and `bench load` have in common: models, prompts, a folder, a page.

Which pairs a comparison of engines is about: the user's models, or several known pairs.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.cli.main import INTERRUPTED
from outrider.cli.output import check_writable, fitted, json_line, prose, say, screen_table, taken
from outrider.cli.session import without_draft
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, MachineError, did_you_mean
from outrider.core.fields import split, words_of
from outrider.core.params import SamplingParams
from outrider.core.settings import DEFAULT, Resolved
from outrider.kernels.operators import pick_device
from outrider.models.loading import resolve
from outrider.pairs.catalog import EMBEDDED_TARGET, ModelPair, draft_of, get_pair
from outrider.plugins.measure.turns import provenance
from outrider_lab.bench import drawing
from outrider_lab.bench.studies.engines_cells import Taken
from outrider_lab.bench.studies.engines_plan import Contestant, EnginePlan
from outrider_lab.bench.studies.engines_run import Loaded, Models, load_engines, run
from outrider_lab.measure.frame import csv_text
from outrider_lab.measure.machine import machine, new_run_id, weights_digest
from outrider_lab.measure.store import (
    RESULTS,
    Page,
    Picture,
    Section,
    write_json,
    write_page,
    write_text,
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A pair under the name it has in results, and the settings of its engines. `own_controller`
    says that the user chose one."""

    name: str
    models: Models
    engine: EngineConfig
    own_controller: bool


def subject(resolved: Resolved, *, most_in_flight: int) -> Subject:
    """The models that settings name. A batch holds all that will be in flight unless its size was
    set."""
    program, engine = resolved.program(), _engine(resolved, most_in_flight)
    draft = None if program.draft in ("auto", "none") else program.draft
    slug = re.sub(r"[^\w.-]+", "-", Path(program.target).name or program.target).strip("-.")
    return Subject(slug or "model", Models(program.target, draft), engine, _own(resolved))


def known_pairs(resolved: Resolved, names: str, *, most_in_flight: int) -> list[Subject]:
    """Those of `outrider models pairs`, each once, in their published precision; --draft replaces
    their drafts, and none drops them. Raises ConfigError."""
    if resolved.chosen["target"].origin.startswith("--"):
        raise ConfigError("--pairs and --target both name models.", hint="drop one of them")
    pairs = words_of("--pairs", names, hint="`outrider models pairs` lists them")
    engine, draft = _engine(resolved, most_in_flight), resolved.program().draft
    return [_known(get_pair(name), engine, draft, own=_own(resolved)) for name in pairs]


def _known(pair: ModelPair, engine: EngineConfig, draft: str, *, own: bool) -> Subject:
    if engine.drafter == "auto" and pair.drafter != "auto":
        bits = pair.self_quantise or engine.self_quantise
        engine = replace(engine, drafter=pair.drafter, self_quantise=bits)
    if engine.dtype == "auto" and pair.target_model_id != EMBEDDED_TARGET:
        engine = replace(engine, dtype=pair.target.dtype)
    chosen = {"auto": pair.draft_to_load, "none": None}.get(draft, draft)
    return Subject(pair.pair_name, Models(pair.target_model_id, chosen), engine, own)


def _engine(resolved: Resolved, most_in_flight: int) -> EngineConfig:
    """Without a draft, plain decoding, unless another drafter was asked for by name."""
    engine = resolved.engine()
    if resolved.chosen["batch_size"].origin == DEFAULT:
        engine = replace(engine, batch_size=most_in_flight)
    return without_draft(engine) if resolved.program().draft == "none" else engine


def _own(resolved: Resolved) -> bool:
    return resolved.chosen["controller"].origin != DEFAULT


def chosen_words(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The words between commas, each once. Raises ConfigError for one that is not `known`."""
    found = split(text)
    for word in found:
        if word not in known:
            raise ConfigError(f"{flag}: no {word!r} here.", hint=did_you_mean(word, known))
    return found


def sampling(resolved: Resolved, max_tokens: int) -> SamplingParams:
    params = resolved.repeatable_sampling()
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))


def loaded_engines(names: Sequence[str], about: Subject) -> AbstractContextManager[Loaded]:
    """Every engine with its models; closed at the end. Raises OutriderError if none can run."""
    loaded = load_engines(names, about.models, about.engine, own_controller=about.own_controller)
    for note in loaded.notes:
        say(f"note: {note}")
    return closing(loaded)


def origins(about: Subject, resolved: Resolved) -> dict[str, object]:
    """Which models and machine the numbers are of."""
    models = about.models
    draft = models.draft or draft_of(models.target)
    names = {"target": models.target, **({"draft": draft} if draft else {})}
    return {
        "pair": about.name,
        "machine": machine(about.engine.device),
        "models": names,
        "weights": {side: weights_digest(resolve(name)) for side, name in names.items()},
        "settings": resolved.decided(),
    }


def folder_of(kind: str, given: str | None, subjects: Sequence[Subject]) -> Path:
    """Where results go; a new folder, unless one was named. Raises ConfigError if it has some."""
    if given is not None:
        folder = Path(given)
        if any((place / RESULTS).exists() for place in (folder, *_children(folder))):
            raise ConfigError(
                f"{folder} has results already, and nothing is overwritten.",
                hint=f"choose another folder, such as --output-dir {given}-2",
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(
                f"{folder} cannot be made: {error.strerror or error}.",
                hint="name another folder with --output-dir",
            ) from None
        check_writable(folder / RESULTS)
        return folder
    today = datetime.date.today().isoformat()
    device = pick_device(subjects[0].engine.device).type
    stem = f"{today}-{device}-{'+'.join(about.name for about in subjects)}-{kind}"
    taken = (n for n in range(1, 10_000) if not (Path("results") / _numbered(stem, n)).exists())
    return Path("results") / _numbered(stem, next(taken))


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _numbered(stem: str, number: int) -> str:
    return stem if number == 1 else f"{stem}-{number}"


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A CSV file with a row a request."""
    write_text(path, csv_text(rows))


def page_text(page: Page) -> str:
    """Every section with its table."""
    lines = [page.title, ""]
    for section in page.sections:
        lines += [section.title, *map(prose, section.text)]
        if section.rows:
            lines.append(screen_table(section.rows, header=section.header))
        lines += [*map(prose, section.points), ""]
    return "\n".join(lines)


def draw(wanted: bool, make: Callable[[], Sequence[Path]]) -> Sequence[Path]:
    """What `make` writes, if figures are wanted and can be drawn."""
    if not wanted:
        return []
    reason = drawing.why_not()
    if reason is not None:
        say(f"note: {reason}")
        return []
    return make()


def write_pages(folder: Path, page: Page, drawn: Sequence[Path]) -> None:
    """`page` with the figures that were drawn, whose addresses are paths from the page on."""
    pictures = [
        Picture(
            title=path.stem.replace("_", " "),
            light=path.relative_to(folder).as_posix(),
            dark=path.with_stem(f"{path.stem}-dark").relative_to(folder).as_posix(),
        )
        for path in drawn
        if path.suffix == ".svg" and not path.stem.endswith("-dark")
    ]
    figures = [Section(title="Figures", pictures=pictures)] if pictures else []
    write_page(folder, Page(page.title, [*page.sections, *figures]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a study measured, until an interrupt if its record is not `complete`: the record, its
    tables, rows by the name of a CSV file, and what draws figures. `more` are files of the folder
    that are written already."""

    folder: Path
    record: dict[str, object]
    page: Page
    rows: Mapping[str, Sequence[Mapping[str, object]]] = field(
        default_factory=dict[str, Sequence[Mapping[str, object]]]
    )
    draw: Callable[[], Sequence[Path]] = tuple
    more: Sequence[str] = ()
    failed: bool = False
    resumable: bool = False

    @property
    def printed(self) -> dict[str, object]:
        """For programs to read."""
        return {"folder": str(self.folder), **self.record}

    @property
    def whole(self) -> bool:
        return self.record["complete"] is True

    def write(self, *, shown: bool, plots: bool = True) -> None:
        """The record, rows, figures and pages; prints the tables if they are to be `shown`."""
        write_json(self.folder / RESULTS, self.record)
        for name, rows in self.rows.items():
            write_rows(self.folder / name, rows)
        write_pages(self.folder, self.page, draw(plots, self.draw))
        if shown:
            print(fitted(page_text(self.page)))
            files = (*self.more, RESULTS, *self.rows, "report.md", "report.html")
            print(fitted(f"results: {self.folder} ({', '.join(files)})"))

    def end(self, *, as_json: bool) -> int:
        """Print the record if it is asked for; the exit code."""
        if as_json:
            print(json_line(self.printed))
        if self.whole:
            return int(self.failed)
        again = f"; the same command with --output-dir {self.folder} goes on from there"
        what = f"\ninterrupted: what was measured until then is in {self.folder}"
        say(what + (again if self.resumable else ""))
        return INTERRUPTED


def head(kind: str, about: Subject, resolved: Resolved, schema: str) -> dict[str, object]:
    """What a record begins with."""
    return {
        "benchmark": kind,
        "schema": schema,
        "run_id": new_run_id(),
        "provenance": provenance(),
        **origins(about, resolved),
    }


def measure(
    plan: EnginePlan, found: Sequence[Contestant], *, title: str
) -> tuple[list[Taken], bool]:
    """What was taken, and whether that is everything or an interrupt came. With a progress bar."""
    return taken(run(plan, found), title=title, total=len(plan.visits()))
