"""Runs one study of this folder: `python studies/run.py NAME [OPTION...]`.

NAME is also that of its result files in studies/results. `run.py NAME --help` has the question
and the options. The last line of a run is one JSON object.
"""

from __future__ import annotations

import importlib
import sys

# The module of each study.
STUDIES = {
    "limits": "limits",
    "batch": "limits",
    "comm": "comm",
    "launches": "launches",
    "ssd": "cost_study.ssd",
    "verify_cost": "pass_cost",
    "linear_rows": "linear_rows",
    "table": "table",
    "grouped_experts": "grouped_experts",
    "expert_prefetch": "expert_prefetch",
    "memory_cost": "pass_cost",
    "accept_cost": "accept_cost",
    "drafter_cost": "round_cost",
    "lookup_cost": "lookup_cost",
    "overhead": "round_cost",
    "predicted": "predicted",
    "tiers": "predicted",
    "synthetic": "synthetic",
    "engines": "verbs",
    "drafters": "verbs",
    "soak": "unchanged",
    "quantise_error": "unchanged",
    "vs_transformers": "vs_transformers",
    "parity": "parity_matrix",
    "features": "parity_matrix",
    "engines_parity": "parity_matrix",
    "drafters_parity": "parity_matrix",
    "gate": "gate",
    "ranks": "ranks",
    "hand_over": "hand_over",
    "auto": "auto_pays",
    "portfolio": "portfolio_pays",
    "suggest": "suggest",
    "structured": "structured",
    "serving": "serving",
    "served_batch": "served_batch",
    "serving_beside": "serving_beside",
    "gateways": "gateways",
    "fleet": "fleet",
    "ray_serve": "ray_serve",
    "ray_batch": "ray_batch",
    "replicas": "replicas",
    "replica_killed": "replicas",
    "served_soak": "served_soak",
    "served_faults": "served_faults",
    "served_promises": "served_promises",
    "kv_formats": "kv_formats",
    "gguf": "gguf",
    "gguf_requests": "gguf_requests",
    "gguf_texts": "gguf_texts",
    "audits": "audits",
    "prompt_store": "prompt_store",
    "start": "start",
}


def main(words: list[str]) -> int:
    name = words[0] if words else ""
    if name not in STUDIES:
        print(f"{__doc__}\nNAME is one of {', '.join(STUDIES)}.", file=sys.stderr)
        return 2
    return getattr(importlib.import_module(STUDIES[name]), name).main(words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
