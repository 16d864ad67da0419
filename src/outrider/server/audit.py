"""`--audit`: a share of the requests is run again without speculation; the texts must be equal.

Only requests whose text is promised to be the same are audited: greedy ones, and those whose noise
is drawn by token position. An audit runs while the server is idle and stops as soon as a request
arrives, so it delays a request by a round at most. An audit that finds no idle time is dropped, and
counted as dropped. A difference is reported by the log (without any of the text), by `/health`, by
the dashboard and by a counter.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

import msgspec

from outrider.core.errors import OutriderError
from outrider.server.port import EngineRequest, is_repeatable
from outrider.server.site import Api, Ended, Site

_LOG = logging.getLogger(__name__)
Outcome: TypeAlias = Literal["same", "different", "dropped", "failed"]
# Audits that wait for an idle engine, and how often one gives way before it is dropped.
_MOST_WAITING, _MOST_TRIES = 64, 16
_LOOK_SECONDS = 0.01


class Auditor:
    """An observer of a `site`'s requests that audits a `share` of them while `run` runs. It calls
    `report` with the outcome of each audit and the model's name."""

    def __init__(
        self,
        site: Site,
        share: float,
        report: Callable[[Outcome, str], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._sites = {one.names[0]: one for one in site.all}
        self._traffic, self._share, self._draw = site.traffic, share, draw
        self._report = report
        self._waiting: deque[Ended] = deque()
        self._has_work = asyncio.Event()

    def wrote(self, num_tokens: int, *, model: str, engine: int) -> None: ...

    def observe_refusal(self, status: int, api: Api) -> None: ...

    def observe(self, ended: Ended) -> None:
        if not self._is_promised(ended) or self._draw() >= self._share:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._report("dropped", ended.model)
            return
        self._waiting.append(ended)
        self._has_work.set()

    async def run(self) -> None:
        """Audit until cancelled, as long as the server runs."""
        while True:
            if not self._waiting:
                self._has_work.clear()
                await self._has_work.wait()
            ended = self._waiting.popleft()
            self._report(await self._outcome(ended), ended.model)

    def _is_promised(self, ended: Ended) -> bool:
        """Return whether the request used drafts and its text must be the same without them."""
        result, card = ended.result, self._sites[ended.model].port.card
        whole = result.finish_reason in ("stop", "length") and not ended.request.written
        return whole and result.stats.num_drafted > 0 and is_repeatable(card, ended.request.params)

    async def _outcome(self, ended: Ended) -> Outcome:
        request = _plain(ended.request)
        for _ in range(_MOST_TRIES):
            while not self._is_idle(ended.model):
                if self._sites[ended.model].port.status.state == "unloaded":
                    return "dropped"
                await asyncio.sleep(_LOOK_SECONDS)
            work = asyncio.ensure_future(self._ids(ended.model, request))
            try:
                while not work.done() and self._is_idle(ended.model):
                    await asyncio.wait({work}, timeout=_LOOK_SECONDS)
                if work.done():
                    return self._compared(ended, work.result())
            except (OutriderError, RuntimeError) as error:
                # The engine may have crashed in the meantime, or its model was unloaded.
                _LOG.info("an audit could not be run: %s", type(error).__name__)
                return "failed"
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        return "dropped"

    def _is_idle(self, model: str) -> bool:
        """Return whether no request of any model is in flight: all models share one machine."""
        ready = self._sites[model].port.status.state == "ready"
        return ready and not self._traffic.num_running and not self._traffic.ending

    async def _ids(self, model: str, request: EngineRequest) -> tuple[int, ...]:
        stream = self._sites[model].port.stream(request)
        try:
            async for _ in stream:
                pass
            return stream.result.token_ids
        finally:
            stream.cancel()

    def _compared(self, ended: Ended, plain: tuple[int, ...]) -> Outcome:
        ids, stats = ended.result.token_ids, ended.result.stats
        if ids == plain:
            return "same"
        pairs = zip(ids, plain, strict=False)
        shorter = min(len(ids), len(plain))
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
        params = ended.request.params
        _LOG.error(
            "audit: request %s of %s is another text without speculation, from token %d of %d on "
            "(drafter %s, K %d, rule %s, temperature %g, seed %s)",
            *(ended.request_id, ended.model, first, len(ids), stats.drafter, stats.k),
            *(params.sampler or self._sites[ended.model].port.card.sampler,),
            *(params.temperature, params.seed),
        )
        self._traffic.num_alarms += 1
        return "different"


def _plain(request: EngineRequest) -> EngineRequest:
    """Return the request without speculation, log-probabilities and rounds. It has no key, whose
    share would pay for it, but still finds the key's entries in the prefix cache."""
    params = replace(
        request.params,
        speculative=False,
        drafter=None,
        k=None,
        prediction="",
        logprobs=False,
        top_logprobs=0,
        prompt_logprobs=None,
        round_events=False,
        max_time=0.0,
    )
    return msgspec.structs.replace(request, params=params, key="", weight=1.0)
