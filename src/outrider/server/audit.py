"""`--audit`: a share of the requests is run again without speculation, and must come out the same.

Only texts that are promised to be the same are: greedy ones, and those whose noise is drawn by
place. An audit runs while nobody asks for anything and gives way as soon as somebody does, so it
costs no request more than a round; what finds no such time is dropped, and counted. A difference is
told by the log, without a word of the text, by `/health`, the dashboard and a counter.
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
    """An observer of a `site`'s requests, which audits a `share` of them while `run` runs. `tell`
    hears of the outcome of each, with the model's name."""

    def __init__(
        self,
        site: Site,
        share: float,
        tell: Callable[[Outcome, str], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._sites = {one.names[0]: one for one in site.all}
        self._traffic, self._share, self._tell, self._draw = site.traffic, share, tell, draw
        self._waiting: deque[Ended] = deque()
        self._has_work = asyncio.Event()

    def wrote(self, num_tokens: int, *, model: str, engine: int) -> None: ...

    def observe_refusal(self, status: int, api: Api) -> None: ...

    def observe(self, ended: Ended) -> None:
        if not self._is_promised(ended) or self._draw() >= self._share:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._tell("dropped", ended.model)
            return
        self._waiting.append(ended)
        self._has_work.set()

    async def run(self) -> None:
        """Audit for as long as the server runs."""
        while True:
            if not self._waiting:
                self._has_work.clear()
                await self._has_work.wait()
            ended = self._waiting.popleft()
            self._tell(await self._outcome(ended), ended.model)

    def _is_promised(self, ended: Ended) -> bool:
        """Whether drafts were made, and the text is the same without them."""
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
                # As where the engine ended meanwhile, or its model was unloaded.
                _LOG.info("an audit could not be run: %s", type(error).__name__)
                return "failed"
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        return "dropped"

    def _is_idle(self, model: str) -> bool:
        """No model's requests are in flight, for all share one machine."""
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
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
        params = ended.request.params
        _LOG.error(
            "audit: request %s of %s is another text without speculation, from token %d of %d on "
            "(drafter %s, K %d, rule %s, temperature %g, seed %s)",
            *(ended.request_id, ended.model, place, len(ids), stats.drafter, stats.k),
            *(params.sampler or self._sites[ended.model].port.card.sampler,),
            *(params.temperature, params.seed),
        )
        self._traffic.num_alarms += 1
        return "different"


def _plain(request: EngineRequest) -> EngineRequest:
    """The same text, asked for without drafts and without what is told beside a text. It is of no
    key, which would pay for it, but finds what its key left in the prefix cache."""
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
