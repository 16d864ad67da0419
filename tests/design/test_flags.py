"""The set of flags is a promise: adding or dropping one is a change of this file."""

from __future__ import annotations

import pytest
from cyclopts import App

from outrider.cli.call import completion_app
from outrider.cli.options import Verb
from outrider.cli.verbs import VERBS, find, names

PROGRAM = (
    "--color --config --debug --draft --log-format --log-level --model --no-debug --set --target -m"
)
LANES = (
    "--adaptive-batch --concurrent-lanes --decode-batch --drafter-device --drafter-home "
    "--drafter-timeout --fallback --fan-out --fan-policy --force-hits --hybrid-threshold "
    "--lane-order --lane-streams --lane-sync --lane-threads --max-waiting --no-adaptive-batch "
    "--no-concurrent-lanes --prefill-batch --reserve --saguaro --schedule --tensor-parallel "
    "--verify-batch --verify-margin"
)
STATES = "--state-checkpoints --state-history --state-rollback"
ENGINE = (
    f"{LANES} {STATES} --arena-tokens --batch-size --batched-verify --context --controller "
    "--deterministic --device --drafter --dtype --force-reference --fused-round --k --leniency "
    "--max-ngram --min-k "
    "--min-ngram --no-batched-verify --no-deterministic --no-force-reference --no-fused-round "
    "--no-profile --page-size "
    "--prefill-chunk --profile --quantise --sampler --target-acceptance --target-ms --threads "
    "--head-init --least-confidence --lite-alpha --lite-heads --tree-nodes --tree-shape "
    "--suffix-corpus --suffix-tokens --watchdog "
    "--kv-budget --kv-window --self-quantise --skip-layers"
)
SAMPLING = (
    "--bad-words --frequency-penalty --ignore-eos --logit-bias --logprobs --max-time --max-tokens "
    "--min-p --min-tokens --n --no-ignore-eos --no-logprobs --prediction --presence-penalty "
    "--repetition-penalty --seed --stop --temperature --top-k --top-logprobs --top-p"
)
ALL = f"{PROGRAM} {ENGINE} {SAMPLING}"
# A sweep decides these for each cell; --batch-size and --max-tokens are options of its own.
NOT_IN_SWEEPS = {"--k", "--n", "--top-logprobs"} | {
    f"--{side}{name}" for side in ("", "no-") for name in ("profile", "logprobs")
}
K_SWEEP = " ".join(
    [
        *(flag for flag in ALL.split() if flag not in NOT_IN_SWEEPS),
        "--domains --experiment --fresh --iterations --ks --max-k --no-plots --output-dir --pairs",
        "--preset --prompt-set --prompts --reference --single-prompt --warmup",
    ]
)
# A grid decides these for all its cells.
NOT_OF_GRIDS = NOT_IN_SWEEPS - {"--k"}
OF_GRIDS = " ".join(
    [
        *(flag for flag in ALL.split() if flag not in NOT_OF_GRIDS),
        "--at-once --experiment --fresh --iterations --json --no-plots --output-dir --over --pair",
        "--preset --presets --prompt-set --prompts --requests --warmup",
    ]
)
# A comparison of engines sets these for each of them; --max-tokens is an option of its own.
NOT_OF_ENGINES = {"--schedule", "--n", "--top-logprobs"} | {
    f"--{side}{name}" for side in ("", "no-") for name in ("profile", "logprobs")
}
OF_ENGINES = " ".join(flag for flag in ALL.split() if flag not in NOT_OF_ENGINES)
# A comparison of drafters sets these for each of them; --max-tokens is an option of its own.
NOT_OF_DRAFTERS = {"--drafter", "--tree-nodes", "--n", "--top-logprobs"} | {
    f"--{side}{name}" for side in ("", "no-") for name in ("profile", "logprobs")
}
OF_DRAFTERS = " ".join(flag for flag in ALL.split() if flag not in NOT_OF_DRAFTERS)
# A check of quality takes every rule in turn; --max-tokens is an option of its own.
NOT_OF_QUALITY = {"--sampler", "--n", "--top-logprobs"} | {
    f"--{side}{name}" for side in ("", "no-") for name in ("profile", "logprobs")
}
OF_QUALITY = " ".join(flag for flag in ALL.split() if flag not in NOT_OF_QUALITY)
# A plan tries these, or has an option of its own for them.
NOT_OF_PLANS = {
    *("--drafter", "--k", "--tree-nodes", "--controller", "--schedule", "--watchdog"),
    *("--batch-size", "--context", "--device", "--max-tokens", "--n", "--top-logprobs"),
} | {f"--{side}{name}" for side in ("", "no-") for name in ("profile", "logprobs")}
OF_PLANS = " ".join(flag for flag in ALL.split() if flag not in NOT_OF_PLANS)
OF_TRACES = " ".join(
    flag for flag in ALL.split() if flag == "--schedule" or flag not in NOT_OF_ENGINES
)
# A batch keeps no record of rounds.
OF_BATCHES = " ".join(flag for flag in ALL.split() if flag not in ("--profile", "--no-profile"))
OF_TRAINING = (
    "--batch --device --field --fresh --held-out --json --learning-rate --measure-seconds "
    "--minutes --save-seconds --seed --steps --threads --tokens --warmup --window"
)
OF_DRAFTERS_TRAINING = f"{OF_TRAINING} --exam-prompts --prompts --target --written"

FLAGS: dict[tuple[str, ...], str] = {
    (
        "generate",
    ): f"{ALL} --choice --compare --grammar --json --json-object --output --quiet --regex "
    "--schema --stdin",
    ("chat",): f"{ALL} --json --system",
    ("batch",): f"{OF_BATCHES} --choice --fresh --grammar --json --json-object --output --quiet "
    "--read-ahead --regex --schema --unordered",
    ("models", "pull"): "--draft --json --revision",
    ("models", "list"): "--json",
    ("models", "inspect"): "--json",
    ("models", "load"): "--dtype --json --n-tokens",
    ("models", "inflate"): "--dtype --json --source",
    ("models", "export"): "--force --gguf --json --pre-tokenizer",
    ("models", "ollama"): "--host --json --max-tokens --model --prompt",
    ("models", "ping"): "--json --max-tokens --model --prompt --retries --timeout --url",
    ("pairs",): "--json",
    ("draft", "suggest"): "--json",
    ("draft", "check"): "--json --k --max-tokens --measure --prompts",
    ("verify",): f"{ALL} --deep --json --output",
    ("bench", "k"): f"{K_SWEEP} --json",
    ("bench", "sweep"): OF_GRIDS,
    ("bench", "comm"): "--device --json --largest-mb --model --output --ranks",
    ("bench", "drafters"): f"{OF_DRAFTERS} --csv --domains --drafters --json --no-plots "
    "--output-dir --prompts --repeats",
    ("bench", "peers"): f"{PROGRAM} --drafters --formats --json --max-tokens --minutes "
    "--output-dir --peers --peers-folder --prompts --quick --seldom --servers --temperatures "
    "--threads --tier --trials",
    ("bench", "quality"): f"{OF_QUALITY} --domains --formats --json --output --prompts --rules "
    "--text --text-tokens",
    ("bench", "engines"): f"{OF_ENGINES} --csv --engines --gap --json --levels --no-plots "
    "--output-dir --pairs --prompts --repeats --requests --warmup",
    ("bench", "ssd"): "--alphas --batches --costs --device --dtype --fan-outs --hits --json --ks "
    "--layer-share --max-tokens --output-dir --pairs --pass-scale --quantise --quick --repeats "
    "--scale --seed --studies --tensor-parallel --threads",
    ("bench", "load"): f"{OF_ENGINES} --concurrency --csv --duration --engines --json "
    "--max-concurrent --output-dir --prompts --rate --repeats --replay --requests --scenarios",
    ("plan",): f"{OF_PLANS} --alpha --batch --context --device --domains --draft-device "
    "--drafters --fresh --json --max-tokens --prompts --save --seconds",
    ("simulate",): "--alpha --arrivals --batch --calibration --contention --context "
    "--decode-batch --device --draft --draft-device --drafter --engines --fan-out --figure "
    "--hybrid-threshold --json --k --max-tokens --p-hit --places --prefill-chunk --requests "
    "--seed --spread --sweep --sync-us --target --trace --verify-batch",
    ("report",): "--figures --json --output",
    ("trace",): f"{OF_TRACES} --figure --figure-seconds --json --output",
    ("train", "draft"): f"{OF_DRAFTERS_TRAINING} --dtype --hidden --layers --on-policy --reverse "
    "--start --temperature",
    ("train", "eagle"): f"{OF_DRAFTERS_TRAINING} --draft-vocab --dtype --ffn --turns",
    ("train", "block"): f"{OF_DRAFTERS_TRAINING} --context-tokens --dtype --layers --places",
    ("train", "medusa"): f"{OF_DRAFTERS_TRAINING} --dtype --heads --init --layers",
    ("train", "mtp"): f"{OF_DRAFTERS_TRAINING} --blocks --dtype --turns",
    (
        "train",
        "pretrain",
    ): f"{OF_TRAINING} --dtype --family --hidden --layers --teacher --tokenizer",
    ("train", "tokenizer"): "--field --json --size --tokens",
    ("prompts",): "--domains --json --output --source --tiny-output --tokenizer",
    ("explain",): "--alpha --bandwidth --batch --branches --c --context --json --k --p-hit "
    "--parameters --tflops --verify --watts",
    ("doctor",): f"{PROGRAM} {ENGINE} --json --measure",
    ("config",): f"{ALL} --json",
    ("completion",): "",
}


# The same verbs at another place.
FLAGS.update(
    {
        ("pull",): FLAGS["models", "pull"],
        ("list",): FLAGS["models", "list"],
        ("models", "pairs"): FLAGS["pairs",],
        ("bench", "simulate"): FLAGS["simulate",],
        ("bench", "prompts"): FLAGS["prompts",],
    }
)


def verb_of(words: tuple[str, ...]) -> Verb:
    verb = find(VERBS, words[0])
    for word in words[1:]:
        assert verb is not None
        verb = find(verb.parts, word)
    assert verb is not None
    return verb


@pytest.mark.parametrize("words", FLAGS, ids=" ".join)
def test_the_flags_of_a_verb_are_frozen(words: tuple[str, ...]) -> None:
    assert set(verb_of(words).flags()) == {*FLAGS[words].split(), "--help", "--help-all"}


def test_the_verbs_are_frozen() -> None:
    assert set(names(VERBS)) == {words[0] for words in FLAGS} | {"run"}
    parts = {(verb.name, part.name) for verb in VERBS for part in verb.parts}
    assert parts == {words for words in FLAGS if len(words) > 1}


@pytest.fixture(scope="module")
def app() -> App:
    return completion_app()


@pytest.mark.parametrize("words", FLAGS, ids=" ".join)
def test_the_parser_knows_exactly_these_flags(app: App, words: tuple[str, ...]) -> None:
    _, chain, _ = app.parse_commands(list(words))
    found = {
        name
        for argument in chain[-1].assemble_argument_collection()
        for name in argument.names
        if name.startswith("-")
    }
    assert found == set(FLAGS[words].split())
