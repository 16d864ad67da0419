"""What fits into the memory there is: a target by itself, and a drafter beside it."""

from __future__ import annotations

from outrider.core.errors import CapacityError
from outrider.estimate.calibration import Calibration, DrafterCosts
from outrider.planner.candidates import Job, memory_bytes


def must_fit(calibration: Calibration, job: Job, limit: int | None) -> None:
    """Raises CapacityError for a target that needs more than `limit` bytes."""
    needed = memory_bytes(calibration, None, job)
    if limit is None or needed is None or needed <= limit:
        return
    weights = calibration.memory_bytes
    kept = needed - weights
    hint = "lower --batch, --context or --max-tokens, or try --quantise int8"
    if weights > limit:
        hint = "try --quantise int8 or int4, a smaller target, or a device with more memory"
    raise CapacityError(
        f"{calibration.target_name} needs {_gb(needed)} ({_gb(weights)} of weights, {_gb(kept)} of "
        f"keys and values of {job.batch} x {job.context + job.new_tokens} tokens), and there are "
        f"{_gb(limit)}.",
        hint=hint,
    )


def no_room(
    calibration: Calibration, drafter: DrafterCosts, job: Job, limit: int | None
) -> str | None:
    """Why `drafter` does not fit beside the target."""
    needed = memory_bytes(calibration, drafter, job)
    if limit is None or needed is None or needed <= limit:
        return None
    return f"{drafter.name}: with it {_gb(needed)} are needed, and there are {_gb(limit)}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
