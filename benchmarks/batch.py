"""Throughput of plain decoding by the number of sequences that run at once, on tier B.

    python benchmarks/batch.py [--model FOLDER] [--output FILE] [--quick]

One engine decodes 1, 2, 4, 8 and 16 prompts of one length at once, greedily, each to the same
number of tokens. `decode` counts from when the last sequence has its first token, so that prefill
is left out; `whole` counts everything. Numbers of sequences take turns, and figures are medians.
Bar: 16 sequences decode at 8 times the rate of one. The last line is one JSON object.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import kernel_names, options_of, reported, take_turns, tier_folders

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.result import GenerationResult
from outrider.bench.workload import WORKLOADS, load_prompts

COUNTS = (1, 2, 4, 8, 16)
PROMPT_TOKENS, NUM_TOKENS = 64, 24
BAR = 8.0


def main() -> None:
    parser = options_of(__doc__, tiers=True)
    parser.add_argument("--quantise", default="none", choices=("none", "int8", "int4"))
    options = parser.parse_args()
    repeats, num_tokens = (1, 6) if options.quick else (4, NUM_TOKENS)
    with reported("batch", options) as report, tier_folders(options) as folders:
        llm = loaded(folders["b"], options.quantise)
        prompts = prompts_of(llm)
        report |= {"kernels": kernel_names(llm.kernels), "quantise": options.quantise}
        report |= {"prompt_tokens": PROMPT_TOKENS, "max_tokens": num_tokens}
        report["cells"] = cells(llm, prompts, num_tokens, repeats)
        report |= {"ratio_at_16": report["cells"][-1]["decode_ratio"], "bar": BAR}


def loaded(folder: Path, quantise: str) -> LLM:
    most = max(COUNTS)
    config = EngineConfig(
        drafter="none",
        batch_size=most,
        quantise=quantise,
        device="cpu",
        arena_tokens=most * 4 * (PROMPT_TOKENS + NUM_TOKENS),
    )
    return LLM(folder, config=config)


def prompts_of(llm: LLM) -> list[list[int]]:
    """As many as run at most at once, of one length; no two share a beginning."""
    texts = [text for name in WORKLOADS for text in load_prompts(name)]
    ids = [llm.tokenizer.encode(text)[-PROMPT_TOKENS:] for text in texts]
    return [found for found in ids if len(found) == PROMPT_TOKENS][: max(COUNTS)]


def cells(
    llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    rates: dict[int, list[float]] = {count: [] for count in COUNTS}

    def turn(count: int) -> Callable[[], object]:
        def run() -> None:
            rates[count].append(decode_rate(llm.generate(prompts[:count], params)))

        return run

    seconds = take_turns({count: turn(count) for count in COUNTS}, repeats)
    # The first turn warms up and is not timed.
    decode = {count: statistics.median(found[1:]) for count, found in rates.items()}
    whole = {count: count * num_tokens / statistics.median(seconds[count]) for count in COUNTS}
    result: list[dict[str, Any]] = []
    for count in COUNTS:
        cell = {
            "sequences": count,
            "decode_tokens_per_second": round(decode[count], 2),
            "whole_tokens_per_second": round(whole[count], 2),
            "decode_ratio": round(decode[count] / decode[1], 3),
            "whole_ratio": round(whole[count] / whole[1], 3),
        }
        result.append(cell)
        print(
            f"{count:2} sequences: {decode[count]:8.1f} tok/s, {cell['decode_ratio']:.2f} of one; "
            f"with prefill {whole[count]:8.1f}, {cell['whole_ratio']:.2f}"
        )
    return result


def decode_rate(results: Sequence[GenerationResult]) -> float:
    """Tokens a second once every sequence has its first."""
    started = max(result.token_seconds[0] for result in results)
    ended = max(result.token_seconds[-1] for result in results)
    later = sum(second > started for result in results for second in result.token_seconds)
    return later / (ended - started)


if __name__ == "__main__":
    main()
