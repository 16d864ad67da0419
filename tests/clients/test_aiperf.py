"""AIPerf, NVIDIA's load tool: a short run by each API, whose report has no error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("aiperf")
NUM_REQUESTS, NUM_TOKENS = 8, 24
TOKENIZER = Path(__file__).parents[2] / "src" / "outrider" / "pairs" / "tiny" / "target"


def report(program, served, home: Path, api: str) -> dict[str, object]:
    words = {
        "--model": served.model,
        "--endpoint-type": api,
        "--tokenizer": str(TOKENIZER),
        "--request-count": str(NUM_REQUESTS),
        "--concurrency": "2",
        "--synthetic-input-tokens-mean": "40",
        "--output-tokens-mean": str(NUM_TOKENS),
        "--extra-inputs": "ignore_eos:true",
        "--artifact-dir": str(home / "found"),
        "--ui": "none",
    }
    with program("aiperf/bin/aiperf", url=served.url) as client:
        given = [word for pair in words.items() for word in pair]
        given += ["--url", client.tap.url, "--streaming", "--use-server-token-count"]
        client.run("profile", *given)
        assert len([one for one in client.tap.kept if one.method == "POST"]) == NUM_REQUESTS
    return json.loads((home / "found" / "profile_export_aiperf.json").read_text("utf-8"))


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
def test_a_report_has_no_error_and_what_the_server_told(served, program, tmp_path, api):
    found = report(program, served, tmp_path / "home", api)
    assert found["is_complete"]
    assert found["error_summary"] == []
    assert found["request_error_rate"]["avg"] == 0
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert found["time_to_first_token"]["min"] > 0
    # It reads no usage of a response that is incomplete, and speculation where vLLM tells of it.
    if api != "responses":
        assert found["total_osl"]["avg"] == NUM_REQUESTS * NUM_TOKENS
    if api in ("chat", "completions"):
        by_accepted = found["pooled_spec_decode_acceptance_histogram"]
        assert sum(by_accepted.values()) == found["total_spec_decode_steps"]["avg"] > 0
        accepted = sum(int(accepted) * steps for accepted, steps in by_accepted.items())
        assert accepted == found["total_accepted_draft_tokens"]["avg"] > 0
    gauges = json.loads((tmp_path / "home/found/server_metrics_export.json").read_text("utf-8"))
    assert "outrider_generation_tokens" in gauges["metrics"]
