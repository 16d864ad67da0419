"""Write into heads that are there what they bring and cost here, as `outrider train` does at its
end.

scripts/state_worth.py TARGET FOLDER DRAFTER; FOLDER is the target's own for a block in its files.
"""

from __future__ import annotations

import sys
from pathlib import Path

from outrider_lab.bench.requests import texts_of
from outrider_lab.train.worth import state_worth

_NUM_PROMPTS = 18


def main() -> None:
    target, folder, drafter = sys.argv[1:]
    prompts = texts_of("mixed")[:_NUM_PROMPTS]
    worth = state_worth(target, Path(folder), prompts, drafter=drafter)
    print(
        worth
        if worth is None
        else f"{worth}: K = {worth.best_k}, {worth.speed_up(worth.best_k):.2f}"
    )


main()
