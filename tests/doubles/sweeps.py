"""Samples of a sweep that nobody measured, for what reads and draws them."""

from __future__ import annotations

from pathlib import Path

from outrider.bench.studies.sweep_record import (
    BenchmarkConfig,
    Circumstances,
    Numbers,
    ResultsFolder,
    Sample,
)

SETTINGS = {"temperature": 0.0, "max_tokens": 8, "batch_size": 1, "sampler": "block"}


def circumstances(**changes: object) -> Circumstances:
    terms: dict[str, object] = {
        "pair": "toy",
        "machine": {"cpu": "abacus", "cores": 2, "device": "cpu", "gpu": None},
        "settings": SETTINGS | {"drafter": "model"},
        "weights": {"target": "aa", "draft": "bb"},
        "prompt_sets": {"code": "cc", "maths": "dd"},
    }
    return Circumstances(**(terms | changes))  # pyright: ignore[reportArgumentType]


def config(k: int, domain: str = "code") -> BenchmarkConfig:
    return BenchmarkConfig(
        model_pair_name="toy",
        prompt_domain=domain,
        k=k,
        temperature=0.0,
        max_tokens=8,
        seed=0,
        drafter="model" if k else "none",
    )


def numbers(k: int, seconds: float, *, accepted: int = 4, identical: bool = True) -> Numbers:
    """Eight tokens. With drafts, in four rounds of which `accepted` kept one each."""
    histogram = [4 - accepted, accepted, *[0] * (k - 1)] if k else []
    return Numbers(
        num_prompt_tokens=5,
        num_tokens=8,
        seconds=seconds,
        first_token_seconds=seconds / 8,
        prefill_seconds=seconds / 8,
        draft_seconds=seconds / 4 if k else 0.0,
        verify_seconds=seconds / 2,
        accept_seconds=seconds / 16,
        verify_ms=1 + k / 10,
        num_rounds=4 if k else 8,
        num_drafted=4 * k,
        num_accepted=accepted if k else 0,
        accepted_histogram=histogram,
        token_ms=[seconds * 100 * (1 + i / 10) for i in range(7)],
        identical=identical,
        digest="0123456789ab",
        request_ms=[seconds * 1000],
        first_ms=[seconds * 125],
        cumulative_p95_ms=seconds * 950,
    )


def sample(
    k: int,
    piece: int,
    measured: Numbers | None,
    *,
    domain: str = "code",
    visit: int | None = None,
    reason: str | None = None,
) -> Sample:
    """Of the piece that is one prompt, number `piece` of its domain."""
    return Sample(
        run=1,
        visit=piece + 1 if visit is None else visit,
        config=config(k, domain),
        piece=f"{domain}_{piece:03d}",
        prompt_ids=[f"{domain}_{piece:03d}"],
        repeat=0,
        reason=reason,
        numbers=measured,
        foreign_cpu_share=0.01,
    )


def folder_of(path: Path, *samples: Sample) -> ResultsFolder:
    """A folder on disk that holds these, as one run."""
    folder = ResultsFolder.open(path)
    folder.add_run(circumstances(), {"notes": []})
    folder.add(samples)
    return folder


def small_sweep(path: Path) -> ResultsFolder:
    """Two domains of five pieces; K=2 wins by a half in code, K=4 loses in maths."""
    seconds = {("code", 2): 0.5, ("code", 4): 0.8, ("maths", 2): 1.0, ("maths", 4): 2.0}
    found: list[Sample] = []
    for number, domain in enumerate(("code", "maths")):
        for piece in range(5):
            for k in (0, 2, 4):
                took = (1 + piece / 10) * seconds.get((domain, k), 1.0)
                visit = 5 * number + piece + 1
                found.append(sample(k, piece, numbers(k, took), domain=domain, visit=visit))
    return folder_of(path, *found)
