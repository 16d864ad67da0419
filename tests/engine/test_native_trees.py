"""Trees of heads are native calls in an engine too, whose room follows the size of its drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.tree_nodes import TreeLimits
from outrider.kernels.native.rounds import CacheSpan
from outrider.kernels.native.trees import Grown, NativeTreeDrafts


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    ("drafter", "dtype"), [("eagle", "auto"), ("mtp", "auto"), ("eagle", "float16")]
)
def test_small_trees_of_one_text_are_made_at_once(
    drafter: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    call = NativeTreeDrafts.__call__

    def counted(
        self: NativeTreeDrafts, feeds: Sequence[CacheSpan], limits: Sequence[TreeLimits]
    ) -> list[Grown] | None:
        grown = call(self, feeds, limits)
        made.append(grown is not None)
        return grown

    monkeypatch.setattr(NativeTreeDrafts, "__call__", counted)
    config = EngineConfig(
        drafter=drafter,
        dtype=dtype,
        k=4,
        tree_nodes=8,
        batch_size=1,
        watchdog="off",
        profile=True,
    )
    (result,) = LLM(config=config).generate("def add(a, b):", SamplingParams(max_tokens=8))
    drafted = [one for one in result.rounds if one.num_drafted]
    assert made == [True] * len(drafted) != []
