"""The folder that a run fills: the finished net in Hugging Face form, and `training/` beside it.

`training/` has what a run needs to go on: its state, the tokens and what was computed from them. It
may be deleted once the net is good. `config.json` is written last, so a folder without it is never
taken for a model. Its card says what it learned from and how good it became.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from outrider.core.errors import ConfigError
from outrider.core.files import Lock, remove, replacing, writing
from outrider.models.checkpoint import WEIGHTS
from outrider_lab.train.checkpoint import Standing
from outrider_lab.train.data import FileRecord
from outrider_lab.train.loop import Export

WORK = "training"
LOCK = ".lock"
STATE = "state.safetensors"
_READABLE = 0o644
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A run's `training/` folder, and the lock of whoever fills it: held as long as this lives, and
    given back when the process ends, however it does."""

    work: Path
    lock: Lock
    made: tuple[Path, ...]

    @contextmanager
    def begun(self) -> Generator[None]:
        """Where the block fails, folders that were made for the run go again."""
        try:
            yield
        except BaseException:
            if self.work in self.made:
                shutil.rmtree(self.work, ignore_errors=True)
            remove(*self.made)
            raise


def claim(folder: Path, *, fresh: bool) -> Claimed:
    """Take the run's `training/` folder within `folder`, made if need be; `fresh` empties it.

    Raises ConfigError if `folder` holds something that is no run, or another run fills it,
    MachineError if it cannot be written.
    """
    work = folder / WORK
    made = tuple(path for path in (work, folder, *folder.parents) if not path.exists())
    with writing(folder):
        try:
            _refuse_strangers(folder, work)
            work.mkdir(parents=True, exist_ok=True)
            lock = Lock(work / LOCK)
            if fresh:
                _empty(work)
            probe = work / ".probe"
            probe.touch()
            probe.unlink()
        except TimeoutError:
            raise ConfigError(
                f"another training fills {folder} at this moment.",
                hint="name another folder, or wait until that one has ended",
            ) from None
        except OSError:
            remove(*made)
            raise
    return Claimed(work, lock, made)


def _empty(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _refuse_strangers(folder: Path, work: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file.", hint="name a new folder")
    if folder.is_dir() and not work.is_dir() and (held := sorted(folder.iterdir())):
        raise ConfigError(
            f"{folder} is there already and holds {held[0].name}, but no run of training.",
            hint="name a new folder",
        )


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The files of a model's tokenizer, for a net that shares it."""
    return tuple(path for name in _TOKENIZER if (path := folder / name).is_file())


def fill(folder: Path, export: Export, card: str, provenance: Mapping[str, object]) -> None:
    """Write the net. Each file is whole or absent. Raises MachineError."""
    texts = {
        "README.md": card,
        "provenance.json": json.dumps(dict(provenance), indent=1) + "\n",
        "config.json": json.dumps(dict(export.config), indent=1) + "\n",
    }
    with writing(folder, SafetensorError):
        with replacing(folder / WEIGHTS, alone=True) as draft:
            save_file(dict(export.tensors), draft, {"format": "pt"})
            # safetensors makes files that only their owner reads.
            draft.chmod(_READABLE)
        for path in export.copied:
            if path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)
        for name, text in texts.items():
            with replacing(folder / name, alone=True) as draft:
                draft.write_text(text, encoding="utf-8")


# Of long lists the card has the beginning; provenance.json has all.
_FILES_SHOWN = 12
_MEASUREMENTS_SHOWN = 10
_UNTOLD = "not told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """All that a card says. `told` is of the command and the machine, `facts` what decided the
    run; `num_parameters` counts what was trained."""

    name: str
    recipe: str
    target: str
    num_parameters: int
    num_text_tokens: int
    files: Sequence[FileRecord]
    standing: Standing
    facts: Mapping[str, object]
    told: Mapping[str, object]


def model_card(made: Made) -> str:
    """Markdown for README.md."""
    return "\n\n".join(
        [
            f"# {made.name}",
            _opening(made),
            "## How good it is\n\n" + _figures(made.standing),
            "## Training\n\n" + _training(made),
            "## Texts\n\n" + _texts(made),
            "## Limits\n\nThe figures are of the prompts named above and of greedy text. Other "
            "text may fit less; `outrider bench k` measures yours.\n",
        ]
    )


def provenance_record(made: Made) -> dict[str, object]:
    """The same for programs, with every file."""
    return {
        "recipe": made.recipe,
        "target": made.target,
        "num_parameters": made.num_parameters,
        "facts": dict(made.facts),
        "told": dict(made.told),
        "standing": made.standing.record(),
        "files": [
            {
                "path": one.path,
                "sha256": one.sha256,
                "bytes": one.num_bytes,
                "licence": one.licence or _UNTOLD,
            }
            for one in made.files
        ],
    }


def _opening(made: Made) -> str:
    size = f"{made.num_parameters / 1e6:.2f} million weights were trained"
    if not made.target:
        return f"A language model made by `outrider train {made.recipe}`; {size}."
    return (
        f"It drafts for `{made.target}`, and was made by `outrider train {made.recipe}`; {size}. "
        "A draft changes the speed of a text, never the text."
    )


def _figures(standing: Standing) -> str:
    """The first measurement, the last, and some between."""
    history = standing.history
    step = max(1, -(-(len(history) - 1) // (_MEASUREMENTS_SHOWN - 1)))
    shown = sorted({*range(0, len(history), step), len(history) - 1})
    names = sorted({name for one in history for name in one.figures})
    head = ["step", "minutes", "loss", *(name.replace("_", " ") for name in names)]
    lines = [f"| {' | '.join(head)} |", "|" + "--:|" * len(head)]
    for place in shown:
        one = history[place]
        loss = f"{one.loss:.3f}" if one.step else ""
        figures = [f"{one.figures[name]:.3f}" if name in one.figures else "" for name in names]
        cells = [str(one.step), f"{one.seconds / 60:.1f}", loss, *figures]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _training(made: Made) -> str:
    lines = [
        f"{made.standing.step} steps over {made.standing.num_tokens} tokens in "
        f"{made.standing.seconds / 60:.1f} minutes, of a text of {made.num_text_tokens} tokens."
    ]
    lines += [f"- {key}: {value}" for key, value in {**made.told, **made.facts}.items()]
    return "\n".join(lines)


def _texts(made: Made) -> str:
    licences = Counter(one.licence or _UNTOLD for one in made.files)
    lines = [f"{len(made.files)} files. Licences:", ""]
    lines += [f"- {licence}: {count} files" for licence, count in licences.most_common()]
    lines += ["", "| file | bytes | SHA-256 |", "|---|--:|---|"]
    lines += [
        f"| {one.path} | {one.num_bytes} | {one.sha256[:16]} |" for one in made.files[:_FILES_SHOWN]
    ]
    if len(made.files) > _FILES_SHOWN:
        lines.append(f"\nprovenance.json lists all {len(made.files)}.")
    return "\n".join(lines)
