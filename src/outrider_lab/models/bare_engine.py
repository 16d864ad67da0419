"""Engine without text: models that are in memory already, token ids in, token ids out.

`LLM` loads a pair by its names and speaks text. Studies of cost run models that have neither names
nor a tokenizer; `BareEngine` wires them to the same engine, lanes and drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from outrider.api.loading import machine_of
from outrider.api.memory import draft_room
from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace, RoundTrace
from outrider.core.errors import CapacityError
from outrider.core.params import SamplingParams
from outrider.core.plugins import MODEL
from outrider.core.process import deferred
from outrider.core.protocols import CausalLM
from outrider.core.resolve import resolve
from outrider.drafters.common.context import LoadedModels
from outrider.engine.build import build_engine, model_capacity, whole_pages
from outrider.engine.round import LiveSequence
from outrider.kernels.operators import Kernels
from outrider.models.decoder import ModelCapacity
from outrider.plugins.lanes.ahead.drafter import AheadDrafter

# Over all engines: what is opened in one must not meet another's in memory that they share.
_seq_ids = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class BareModels:
    """A target, perhaps a draft model, and the target's operators. `twin` makes one more target
    over the same memory for another lane, with its operators; None where there can be none."""

    target: CausalLM
    draft: CausalLM | None
    kernels: Kernels
    device: torch.device
    twin: Callable[[], tuple[CausalLM, Kernels] | None]


class BareEngine:
    """Runs batches of token ids. `on_round` and `on_job` hear of every round and job. Close it at
    the end; it leaves the models' memory as it found it."""

    def __init__(
        self,
        models: BareModels,
        config: EngineConfig,
        *,
        on_round: Callable[[RoundTrace], None],
        on_job: Callable[[JobTrace], None] | None = None,
    ) -> None:
        self._pick = models.kernels.sampling.pick
        self._seqs: dict[int, LiveSequence] = {}
        parts = LoadedModels(
            models.target,
            models.draft,
            models.kernels.argmax,
            sampling=models.kernels.sampling,
            machine=machine_of(models.kernels, models.device, models.twin),
            exact=models.kernels.exact,
            lookups=models.kernels.lookups,
        )
        num_slots = models.target.state.num_free_tokens
        self._engine = build_engine(
            parts.resolve(config), parts, num_slots=num_slots, sink=on_round, jobs=on_job
        )

    @property
    def texts(self) -> Mapping[int, tuple[int, ...]]:
        """What each request got so far, by its number, in the order of submission."""
        return {
            seq_id: tuple(seq.tokens[seq.prompt_length :]) for seq_id, seq in self._seqs.items()
        }

    @property
    def drafted_ahead(self) -> tuple[int, int]:
        """Tokens that were drafted for open verdicts, and rounds in which some were."""
        drafter = self._engine.drafter
        if not isinstance(drafter, AheadDrafter):
            return 0, 0
        stats = drafter.stats()
        return stats.num_tree_nodes, stats.num_prepared

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Hand in a request; its number. No token ends it but the last of `params.max_tokens`.
        Raises CapacityError if memory could never hold it."""
        seq = LiveSequence(
            seq_id=next(_seq_ids),
            tokens=list(prompt),
            prompt_length=len(prompt),
            params=params,
            limit=params.max_tokens,
            pick=self._pick,
        )
        self._engine.submit(seq)
        self._seqs[seq.seq_id] = seq
        return seq.seq_id

    def step(self) -> dict[int, int]:
        """Run until some job has ended; how many tokens requests got, by their number. Raises what
        a request failed for, and CapacityError when nothing is left to run or drafts were lost."""
        with deferred():
            outcomes = self._engine.step()
        for seq in self._engine.given_up():
            raise seq.error or CapacityError("a request was given up.", hint="outrider doctor")
        for seq in self._seqs.values():
            if seq.no_drafts:
                raise CapacityError(
                    f"nothing is drafted any more: {seq.no_drafts}", hint="outrider doctor"
                )
        if not self._engine.has_work and not outcomes:
            raise CapacityError("no request is left to run.", hint="raise max_tokens")
        found: dict[int, int] = {}
        for outcome in outcomes:
            found[outcome.seq_id] = found.get(outcome.seq_id, 0) + len(outcome.tokens)
        return found

    def close(self) -> None:
        """End all requests, and what still runs for them, and the lanes' threads."""
        try:
            for seq_id in self._seqs:
                self._engine.cancel(seq_id)
            while self._engine.executor.busy:
                self._engine.step()
        finally:
            self._engine.close()


def bare_rooms(config: EngineConfig, num_tokens: int) -> tuple[ModelCapacity, ModelCapacity]:
    """For a target and a draft model that run as `config` says, with `num_tokens` a sequence."""
    size = config.page_size
    slots = config.most_batch * whole_pages(num_tokens + config.most_k + 1, size)
    rows = config.most_batch * (config.most_k + 1)
    target = model_capacity(config, slots, max_rows=config.most_chunk + rows, max_logits=rows)
    return target, draft_room(resolve(config, MODEL), slots)
