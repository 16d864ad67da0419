"""A web page that shows runs round by round: `generate --html FILE`, and /html in `chat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.output import check_writable, write_whole
from outrider.core.errors import ConfigError
from outrider.core.files import open_regular

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.api.result import GenerationResult
    from outrider.core.params import SamplingParams
    from outrider.core.settings import Resolved

TITLE = "Outrider: how this text was written"
# A page has its title within this number of bytes.
_HEAD = 4096


@dataclass(slots=True)
class RoundsPage:
    """The page. It is rewritten with each run that is added. Without a file it is off: no round
    events are requested and nothing is written."""

    llm: LLM
    resolved: Resolved
    path: Path | None = None
    _runs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def turn(self, name: str | None, *, flag: str) -> None:
        """Switch the page on, with the file `name` that `flag` gave, or off. Raises MachineError if
        the file cannot be written, ConfigError if it exists and is not such a page."""
        path = Path(name) if name else None
        if path is not None:
            check_writable(path, flag=flag)
            _check_ours(path, flag)
        self.path, self._runs = path, []

    def asking(self, params: SamplingParams) -> SamplingParams:
        """Return `params`, with round events if the page is on."""
        return params if self.path is None else replace(params, round_events=True)

    def add(
        self, prompt: str, results: Sequence[GenerationResult], *, speed_ratio: str = ""
    ) -> str:
        """Add runs and write the page; return a line about it, "" if the page is off."""
        if self.path is None:
            return ""
        from outrider.api.rounds import run_of
        from outrider.measure.pages import run_page

        facts = self._facts()
        for result in results:
            self._runs.append(
                run_of(
                    f"Text {len(self._runs) + 1}",
                    prompt,
                    result,
                    self.llm.tokenizer,
                    facts=facts if result.seed is None else facts | {"seed": str(result.seed)},
                    speed_ratio=speed_ratio,
                )
            )
        page = run_page(TITLE, self._runs)
        write_whole(self.path, page)
        return f"page: {self.path} ({len(page.encode()) / 1e3:.0f} kB)"

    def _facts(self) -> dict[str, str]:
        """Return facts about the texts: the model, and the settings that the user decided."""
        decided = {name: str(value) for name, value in self.resolved.decided().items()}
        first = {
            "model": self.llm.spec.name,
            "drafter": self.llm.drafter,
            "sampler": self.llm.config.sampler,
            "device": str(self.llm.device),
        }
        return first | {name: value for name, value in decided.items() if name not in first}


def _check_ours(path: Path, flag: str) -> None:
    """Check that an existing file is such a page, which is replaced. Raises ConfigError."""
    if not path.exists():
        return
    with open_regular(path) as stream:
        head = stream.read(_HEAD)
    if head and f"<title>{TITLE}</title>".encode() not in head:
        raise ConfigError(
            f"{path} exists already, and it is not a page of {flag}.", hint="name a new file"
        )
