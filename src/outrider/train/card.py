"""The model card of a finished run: what it is, what it learned from, how good it became.

Licences are those that somebody told: of the standard library and of installed packages their own
metadata. Of a user's files nothing is known, and the card says that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.train.data import FileRecord
from outrider.train.standing import Standing

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
