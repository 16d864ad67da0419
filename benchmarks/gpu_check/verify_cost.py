"""What a target pass of several rows costs against one row, at two contexts."""

from __future__ import annotations

from typing import Any

from gpu_check import models
from gpu_check.clock import race
from gpu_check.rounds import captured_pass, read, text
from gpu_check.setting import Setting, check

ROWS = (1, 2, 4, 8, 9, 16, 32)
CONTEXTS = (256, 1000)
MOST_16 = 1.05


def run(setting: Setting, record: dict[str, Any]) -> None:
    rows_tried = (1, 2, 16) if setting.quick else ROWS
    contexts = (40,) if setting.quick else CONTEXTS
    record["cells"] = []
    for name, shape in setting.shapes.items():
        for scheme in ("none",) if setting.quick or name == "8b" else setting.schemes:
            room = models.room_for(1, max(contexts) + 64, rows=128, logits=8)
            model = models.random_model(
                shape, setting, room, vocab_size=setting.vocabulary, quantise=scheme
            )
            for context in contexts:
                read(model, 0, text(context, model.spec.vocab_size))
                passes = {
                    str(rows): captured_pass(model, setting, rows=rows, context=context)
                    for rows in rows_tried
                }
                found = race(passes, setting, calls=1 if setting.quick else 4)
                _note(record, name, scheme, context, found, setting)
                model.state.close(0)
            del model, passes
            models.let_go()


def _note(
    record: dict[str, Any],
    shape: str,
    scheme: str,
    context: int,
    found: dict[str, float],
    setting: Setting,
) -> None:
    one = found["1"]
    for rows, seconds in found.items():
        record["cells"].append(
            {
                "shape": shape,
                "quantise": scheme,
                "context": context,
                "rows": int(rows),
                "ms": 1e3 * seconds,
                "against_one_row": seconds / one,
            }
        )
    if setting.on_cuda and shape == "8b" and context == CONTEXTS[0]:
        ratio = found["16"] / one
        check(
            record,
            f"16 rows cost at most {MOST_16} of one row",
            passed=ratio <= MOST_16,
            detail=f"{ratio:.3f}",
        )
