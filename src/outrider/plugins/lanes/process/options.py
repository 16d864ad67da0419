"""Options of a drafter's process: one JSON object in its command line.

Only the engine writes them, so plain JSON is enough. The module has no tensors, since the process
reads its options before it loads PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.plugins.lanes.ahead.choices import AheadChoices


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOptions:
    """Options for loading the draft model in `folder` and for drafting with it.

    With `ahead` it drafts ahead too. `vocab_size` is the target's, of which the first `num_common`
    ids may be drafted, all if 0; at most `batch_size` sequences draft together, and
    `num_distributions`, K for each, go into one answer. `num_slots`, `page_size`, `max_rows` and
    `max_logits` are the model's capacity, `max_tokens` is its window, which the engine respects.
    `states` are fields of the capacity for the states of a hybrid, with the usual defaults, and
    `chunk` is how many tokens of a prompt it reads at a time. `sampler` is the acceptance rule that
    drafts are drawn for. With `cores` the process uses only these hardware threads.
    """

    folder: str
    vocab_size: int
    num_distributions: int
    num_slots: int
    page_size: int
    max_rows: int
    max_logits: int
    chunk: int
    batch_size: int
    num_common: int = 0
    max_tokens: int | None = None
    states: Mapping[str, int | str] = field(default_factory=dict[str, int | str])
    name: str = ""
    dtype: str = "auto"
    device: str = "auto"
    sampler: str = "block"
    force_reference: bool = False
    deterministic: bool = False
    threads: int = 0
    cores: tuple[int, ...] = ()
    ahead: AheadChoices | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ChildOptions:
        fields: dict[str, Any] = json.loads(text)
        fields["cores"] = tuple(fields["cores"])
        if fields["ahead"] is not None:
            fields["ahead"] = AheadChoices(**fields["ahead"])
        return cls(**fields)
