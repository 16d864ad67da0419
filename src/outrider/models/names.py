"""What a model may be called, and which files of it are read. No tensors, nothing is looked up."""

from __future__ import annotations

import re

ALIASES = {
    "outrider/embedded": "target",
    "outrider/embedded-draft": "draft",
    "outrider/embedded-hybrid": "hybrid/target",
}
# Heads for the embedded target, which are no models.
HEAD_ALIASES = {f"outrider/embedded-{kind}": kind for kind in ("eagle", "medusa", "mtp")}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)
# Data only: nothing that is fetched is ever executed.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# Weights in another layout, and subfolders: a second copy of the model that nothing would read.
HUB_NOISE = ["consolidated*", "*/*"]
