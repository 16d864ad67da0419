"""Greedy parity: speculation on must give the tokens of speculation off, all of them.

Every cell of the matrix (dtype x drafter x K x batch size) is compared, prompt by prompt, with
plain decoding of the same model one request at a time. In float32 plain decoding is also compared
with `transformers`, an implementation that shares no code with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.draft import common_prefix
from outrider.core.params import SamplingParams

Tokens = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The cells to run; `max_tokens` are emitted for each prompt at most."""

    dtypes: Sequence[str] = ("float32", "bfloat16")
    drafters: Sequence[str] = ("model", "ngram")
    ks: Sequence[int] = (1, 2, 4, 8)
    batch_sizes: Sequence[int] = (1, 3, 8)
    max_tokens: int = 128

    @property
    def num_cells(self) -> int:
        cells = product(self.dtypes, self.drafters, self.ks, self.batch_sizes)
        return sum(1 for _ in cells)


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration's result. `first_difference` is (prompt, token) or None."""

    dtype: str
    drafter: str
    k: int
    batch_size: int
    exact_kernels: bool
    num_prompts: int
    num_tokens: int
    num_equal: int
    acceptance_rate: float
    tokens_per_round: float
    first_difference: tuple[int, int] | None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def run_matrix(matrix: Matrix, prompts: Sequence[str]) -> Iterator[Cell]:
    """Yield each cell as it is done."""
    for dtype in matrix.dtypes:
        plain = generate(prompts, EngineConfig(dtype=dtype, drafter="none", batch_size=1), matrix)
        for drafter, k, batch_size in product(matrix.drafters, matrix.ks, matrix.batch_sizes):
            config = EngineConfig(dtype=dtype, drafter=drafter, k=k, batch_size=batch_size)
            yield _cell(config, prompts, plain, matrix)


def generate(prompts: Sequence[str], config: EngineConfig, matrix: Matrix) -> Tokens:
    """Emitted ids of each prompt under `config`, greedily."""
    results = LLM(config=config).generate(prompts, SamplingParams(max_tokens=matrix.max_tokens))
    return [result.token_ids for result in results]


def _cell(config: EngineConfig, prompts: Sequence[str], plain: Tokens, matrix: Matrix) -> Cell:
    llm = LLM(config=config)
    results = llm.generate(prompts, SamplingParams(max_tokens=matrix.max_tokens))
    ours = [result.token_ids for result in results]
    drafted = sum(result.stats.num_drafted for result in results)
    accepted = sum(result.stats.num_accepted for result in results)
    rounds = sum(result.stats.num_rounds for result in results)
    return Cell(
        dtype=config.dtype,
        drafter=config.drafter,
        k=config.k,
        batch_size=config.batch_size,
        exact_kernels=llm.kernels.exact,
        num_prompts=len(prompts),
        num_tokens=sum(map(len, plain)),
        num_equal=num_equal(plain, ours),
        acceptance_rate=round(accepted / max(drafted, 1), 4),
        tokens_per_round=round(sum(map(len, ours)) / rounds, 4),
        first_difference=first_difference(plain, ours),
    )


def num_equal(expected: Tokens, got: Tokens) -> int:
    """Tokens of `expected` that `got` has in the same place, up to each prompt's first difference;
    a prompt that goes on longer than expected counts as different at its end."""
    return sum(common_prefix(a, b) - (len(b) > len(a)) for a, b in zip(expected, got, strict=True))


def first_difference(expected: Tokens, got: Tokens) -> tuple[int, int] | None:
    """(prompt, token) of the first difference, or None."""
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        if tuple(a) != tuple(b):
            return index, common_prefix(a, b)
    return None


def compare_with_transformers(
    generate_ids: Callable[[str], tuple[int, ...]], prompts: Sequence[str], plain: Tokens
) -> dict[str, object]:
    """`plain` beside what `generate_ids` (Hugging Face greedy `generate`) emits."""
    theirs = [generate_ids(prompt) for prompt in prompts]
    return {
        "num_tokens": sum(map(len, theirs)),
        "num_equal": num_equal(theirs, plain),
        "first_difference": first_difference(theirs, plain),
    }
