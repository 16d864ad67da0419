"""A request that engines' processes came and went for: its statistics as those of one request.

The result that the last process tells is of the rounds that ran there. Rounds of those before it
are told with each event, so none is counted whose tokens were lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from outrider.api.result import GenerationResult
from outrider.core.budget import RoundTrace
from outrider.metrics.summary import Stats, summarise, together

# Rounds that are kept one by one; more are added up.
_MOST_ROUNDS = 64


class Progress:
    """What was written of one request so far, and what that took."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._came = monotonic()
        # Of the present process: when it was asked, and its rounds.
        self._asked, self._num_read = 0.0, 0
        self._rounds: list[RoundTrace] = []
        self._stats: list[Stats] = []
        # Of all together, and of processes that ended.
        self._arrivals: list[float] = []
        self._past: list[Stats] = []
        self._num_past, self._num_cached = 0, 0
        self._kept, self._in_vain, self._past_predicted = 0, 0, (0, 0)

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return monotonic() - self._came

    def take(self, num_tokens: int, rounds: Sequence[RoundTrace]) -> None:
        self._arrivals += [round(self.seconds, 9)] * num_tokens
        self._rounds += rounds
        if len(self._rounds) > _MOST_ROUNDS:
            self._add_up()

    def hand_in(self) -> None:
        """It goes to a process, from which the next rounds are."""
        self._asked = self.seconds
        if len(self._arrivals) == self._num_past:
            # The process before wrote nothing, or there was none.
            return
        self._add_up()
        if not self._past:
            # The last token of a prompt is read with the first round.
            self._num_cached = max(0, self._num_prompt - 1 - self._num_read)
        self._past += self._stats
        self._stats.clear()
        self._num_past = len(self._arrivals)
        self._past_predicted = self._kept, self._in_vain

    def whole(self, result: GenerationResult) -> GenerationResult:
        """`result`, which the present process told, with what those before it did."""
        if not self._past:
            return result
        arrivals = [round(self._asked + seconds, 9) for seconds in result.token_seconds]
        arrivals = (*self._arrivals[: self._num_past], *arrivals)
        predicted = result.prediction_tokens
        if predicted is not None:
            kept, in_vain = self._past_predicted
            predicted = predicted[0] + kept, predicted[1] + in_vain
        return replace(
            result,
            stats=together([*self._past, result.stats], total_seconds=arrivals[-1]),
            token_seconds=arrivals,
            num_cached_tokens=self._num_cached,
            prediction_tokens=predicted,
        )

    def _add_up(self) -> None:
        rounds = self._rounds
        k = int(any(trace.num_drafted for trace in rounds))
        self._stats.append(summarise(rounds, drafter="", k=k, total_seconds=0.0))
        self._num_read += sum(trace.num_prompt_tokens for trace in rounds)
        for trace in rounds:
            if trace.drafter == "prediction":
                self._kept += trace.num_accepted
                self._in_vain += trace.num_drafted - trace.num_accepted
        rounds.clear()
