"""core/options.pyi is what the registry says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stubs_are_up_to_date() -> None:
    script = ROOT / "scripts" / "settings_page.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False, timeout=240)
    assert done.returncode == 0, "run `python scripts/settings_page.py`"
