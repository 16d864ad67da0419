"""Studies of drafters that do not pay: texts that hardly repeat, and contestants that are wrong."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import auto_pays
import portfolio_pays
import pytest
from auto_pays import HARD_TEMPERATURE, PLAIN, Told, compared, pieces, repeated
from common import Study
from wrong_drafters import (
    FOR_A_WHILE,
    NEVER,
    RightForAWhile,
    add_right_for_a_while,
    write_untrained,
)

from outrider import LLM, EngineConfig
from outrider.core.errors import ConfigError
from outrider.testing import row
from outrider_lab.bench.workload import ADVERSARIAL

pytestmark = pytest.mark.usefixtures("no_plugin_stays")


def test_a_pair_of_tokens_repeats_what_came_before_it() -> None:
    assert repeated([1, 2, 3], [1, 2, 9, 2]) == 1 / 4
    assert repeated([1], [1, 1, 1]) == 2 / 3
    assert repeated([1, 2], []) == 0


def test_an_unknown_domain_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown domain 'adversrial'") as refused:
        pieces("adversrial", 1, 1)
    assert ADVERSARIAL in (refused.value.hint or "")


@pytest.mark.parametrize(
    "study", [auto_pays.auto, portfolio_pays.portfolio], ids=["auto", "portfolio"]
)
@pytest.mark.parametrize("batch", [1, 8])
def test_an_unknown_domain_is_refused_before_an_engine_is_loaded(study: Study, batch: int) -> None:
    options: Any = SimpleNamespace(
        target="/no", draft="", draft_copies=False, quick=False, pieces=1, batch=batch, threads=1
    )
    options.domains = ["chat", "adversrial"]
    with pytest.raises(ConfigError, match="unknown domain 'adversrial'"):
        study.run(options, {})


def test_a_member_is_right_for_half_of_a_known_text() -> None:
    member = RightForAWhile()
    member.know({(1, 2): [10, 11, 12, 13]}, 0.0)
    member.open(0, [1, 2])
    member.open(1, [3])
    drafts = member.propose([row(0, [1, 2, 10], depth=8), row(1, [3], depth=8)])
    assert [draft.tokens for draft in drafts] == [(11, 13, 12), ()]


def test_wrong_drafters_change_no_sampled_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compared` refuses texts that differ. Trials of the block drafter are counted, and accepted
    drafts of the member that knows the text."""
    monkeypatch.setattr(auto_pays, "NUM_TOKENS", 24)
    accepted: dict[str, int] = {}
    with ExitStack() as stack:

        def loaded(config: EngineConfig, draft: str | None = None) -> LLM:
            llm = LLM(draft=draft, config=config, batch_size=1, threads=1)
            return stack.enter_context(closing(llm))

        member, config = add_right_for_a_while(4)
        engines = {PLAIN: loaded(EngineConfig(drafter="none")), FOR_A_WHILE: loaded(config)}
        untrained = str(write_untrained(engines[PLAIN], tmp_path / NEVER))
        portfolio = EngineConfig(drafter="portfolio", k=4, controller="goodput")
        engines[NEVER] = loaded(portfolio, untrained)
        work = pieces(ADVERSARIAL, 1, 1)
        apart = loaded(EngineConfig(drafter="none"))
        times = compared(engines, work, HARD_TEMPERATURE, tell=Told(apart, member.know))
        for name, llm in engines.items():
            last = llm.last_result
            assert last is not None
            accepted[name] = last.stats.num_accepted
            # No contestant knew the prompt.
            assert last.num_cached_tokens == 0
    assert times.repeated < 0.5
    assert times.trials[PLAIN] == {}
    tokens, seconds = times.trials[NEVER]["dflash"]
    assert tokens > 0
    assert seconds > 0
    assert accepted[FOR_A_WHILE] > 0
    assert accepted[NEVER] <= 1
