"""What `bench peers` may be told, for the table of all verbs."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.cli.verb import Verb
from outrider.core.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions(JsonOption):
    """Of `bench peers`."""

    tier: str | None = setting(
        None,
        "a: the embedded pair (the default); b: its target at the cost of 0.4 billion parameters. "
        "Or name your own with --target.",
        choices=("a", "b"),
    )
    peers: str = setting(
        "transformers,llama.cpp,openvino",
        "Engines to start, between commas (transformers,llama.cpp,openvino).",
    )
    servers: str = setting(
        "",
        "OpenAI-compatible servers that run, between commas, as NAME[+DRAFTER][@FORMAT][/MODEL]"
        "=URL, such as vllm=http://localhost:8000,vllm+model=http://localhost:8001.",
    )
    formats: str = setting(
        "bf16,int8,int4",
        "Number formats of the weights, between commas; also f32 (bf16,int8,int4).",
    )
    drafters: str = setting("none,model,ngram", "Drafters, between commas (none,model,ngram).")
    temperatures: str = setting("0,0.8", "Temperatures, between commas (0,0.8).")
    prompts: int = setting(
        100, "Prompts of HumanEval and of GSM8K, at most (100).", minimum=1, maximum=10_000
    )
    max_tokens: int = setting(128, "Emit at most this many tokens (128).", minimum=1)
    minutes: float = setting(
        6.0, "End after the prompt in which these are over (6).", minimum=0.01, maximum=1e5
    )
    threads: int = setting(0, "Threads of each engine; 0 is one a core.", minimum=0, maximum=1024)
    seldom: str = setting(
        "", "PEER=N, between commas: this one takes part in every Nth prompt only."
    )
    trials: str | None = setting(
        None, "Take the best variants from the results.json of an earlier run."
    )
    quick: bool = setting(False, "Two prompts of 32 tokens: does it all work?")
    peers_folder: str | None = setting(
        None, "Where scripts/peers built the others; peers in the cache folder if not given."
    )
    output_dir: str | None = setting(
        None,
        "Folder of results; results/DATE-DEVICE-MODEL-peers if not given. A run goes on in it.",
    )


BENCH_PEERS = Verb(
    name="peers",
    target="outrider.cli.bench_peers:peers",
    text="Compare with other engines on the same weights and prompts: transformers, llama.cpp, "
    "OpenVINO GenAI, servers.",
    example="outrider bench peers --quick --peers llama.cpp --formats bf16 --temperatures 0",
    options=PeersOptions,
    settings=("program",),
)
