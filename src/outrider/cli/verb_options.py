"""Options of the verbs that write text, serve, fetch models and look at this machine."""

from __future__ import annotations

from outrider.cli.options import (
    ALL,
    DECIDED,
    Argument,
    JsonOption,
    Options,
    OutputOption,
    ReplicasOption,
    StructureOption,
    verb,
)
from outrider.core.fields import setting


@verb(
    "generate",
    "generate:generate",
    Argument("MODEL", "The same as --target, before a prompt.", setting="target", optional=True),
    Argument("PROMPT", "The text to continue."),
    group="Write text",
    settings=ALL,
)
class GenerateOptions(StructureOption, OutputOption):
    """Complete a prompt, coloured by where each token came from.

    outrider generate "def quicksort(items):" --max-tokens 64
    """

    prompt: str | None = setting(None, "The same as PROMPT.")
    stdin: bool = setting(False, "Read the prompt from stdin; a lone - means the same.")
    chat: bool = setting(
        False,
        "Treat the prompt as a message in the model's chat template; the default for an instruct "
        "model.",
    )
    raw: bool = setting(False, "Continue the prompt as it is, even with an instruct model.")
    compare: bool = setting(False, "Also run without drafts: the speed-up.")
    prompts: str | None = setting(
        None,
        "With --compare, each prompt of this file. A text file has one in each line, a .jsonl file "
        'lines such as {"prompt": "..."}. These settings run; `outrider plan` predicts which '
        "drafter and K gain most.",
    )
    quiet: bool = setting(False, "Print only the text.")
    stats: bool = setting(False, "Print all statistics: times, rounds, memory.")
    html: str | None = setting(
        None, "Also write a web page to this file: the text token by token and round by round."
    )


@verb(
    "chat",
    "conversation:chat",
    Argument("MODEL", "The same as --target.", setting="target"),
    Argument("PROMPT", "Answer only this message."),
    group="Write text",
    alias="run",
    settings=ALL,
    stated={"max_tokens": "until the turn ends"},
)
class ChatOptions(StructureOption, JsonOption):
    """Talk to a model, with history and commands such as /help.

    outrider run outrider/embedded "What is 3 plus 4?" --max-tokens 32
    """

    prompt: str | None = setting(None, "The same as PROMPT.")
    system: str | None = setting(None, "System message of the conversation.")
    stats: bool = setting(False, "Print all statistics of each reply.")
    greedy: bool = setting(
        False, "Always take the likeliest token, whatever sampling the checkpoint recommends."
    )


@verb(
    "doctor",
    "outrider.plugins.doctor.verbs:doctor",
    group="This machine",
    settings=("program", "engine"),
)
class DoctorOptions(JsonOption):
    """Show this machine: hardware, kernels, models that fit.

    outrider doctor
    """

    measure: bool = setting(False, "Measure again which kernels are faster on this machine.")


@verb("config", "call:config", group="This machine", settings=ALL)
class ConfigOptions(JsonOption):
    """Show every setting, its value and its origin.

    outrider config --k 6
    """


@verb(
    "completion",
    "call:completion",
    Argument("SHELL", "The shell.", choices=("bash", "zsh", "fish")),
)
class CompletionOptions(Options):
    """Print a completion script for bash, zsh or fish.

    outrider completion bash
    """


@verb(
    "batch",
    "outrider.plugins.batches.verbs:batch",
    Argument("INPUT", 'Lines of OpenAI\'s batches, or {"prompt": ...} with settings; or parquet.'),
    Argument("OUTPUT", "Answers are appended to this file, a line each."),
    group="Write text",
    settings=ALL,
    without=("profile",),
)
class BatchOptions(StructureOption, ReplicasOption, OutputOption):
    """Answer a file of prompts, one JSON line each; a stopped run can be continued.

    echo '{"prompt": "x = "}' > in.jsonl && outrider batch in.jsonl out.jsonl
    """

    output: str | None = setting(None, "Also write the JSON object of --json to this file.")
    unordered: bool = setting(False, "Write answers as they finish, not in the order of the lines.")
    fresh: bool = setting(False, "Drop the answers in the output file, and start again.")
    read_ahead: int = setting(
        256,
        "Read this many lines ahead; more lines share more beginnings of prompts.",
        minimum=1,
        maximum=1_000_000,
    )
    ray: bool = setting(
        False, "Answer on the Ray cluster of RAY_ADDRESS; if unset, on a local one."
    )
    workers: int = setting(
        2, "With --ray, the number of actors that load the model.", minimum=1, maximum=65_536
    )
    quiet: bool = setting(False, "Show no progress.")


@verb(
    "serve",
    "serve:serve",
    Argument(
        "MODEL",
        "The model to serve, as --target; or NAME=MODEL, or NAME=MODEL,DRAFT. Of several, the "
        "first is loaded at the start, the others on demand.",
        setting="target",
        many=True,
    ),
    group="Write text",
    settings=ALL,
    without=(*DECIDED, "seed", "prediction", "prompt_logprobs"),
)
class ServeOptions(ReplicasOption, JsonOption):
    """Serve OpenAI's API over HTTP, for many clients at once.

    outrider serve outrider/embedded --check
    """

    host: str = setting(
        "127.0.0.1", "Listen at this address; one that others can reach needs an API key."
    )
    port: int = setting(8000, "Listen at this port; 0 takes a free one.", minimum=0, maximum=65_535)
    health_port: int = setting(
        0,
        "A second port for /health, /ready and /metrics, whose connections other clients cannot "
        "use up; 0 is none.",
        minimum=0,
        maximum=65_535,
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Require this API key. `ps` shows it to all users of this machine; --api-key-file hides "
        "it. May be repeated.",
    )
    api_key_file: str | None = setting(
        None,
        "File of API keys: one API key per line, optionally followed by its weight (1).",
    )
    open_metrics: bool = setting(
        False, "Serve /metrics without a key, for gateways that have none."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "Name of the model for clients; may be repeated. By default its name here."
    )
    allowed_host: tuple[str, ...] = setting(
        (), "Also answer under this name of the machine; may be repeated."
    )
    allowed_origin: tuple[str, ...] = setting(
        (), "Allow web pages of this origin, such as https://chat.example; may be repeated."
    )
    ssl_certfile: str | None = setting(None, "Serve HTTPS with this certificate chain, in PEM.")
    ssl_keyfile: str | None = setting(None, "The certificate's private key, in PEM.")
    max_queued: int = setting(
        0,
        "Maximum number of requests that wait, 0 for four times as many as run at once. Further "
        "ones are refused, and may be repeated later.",
        minimum=0,
        maximum=1_000_000,
    )
    greedy: bool = setting(
        False,
        "Always take the likeliest token unless a request names its sampling, whatever the "
        "checkpoint recommends.",
    )
    max_loaded_models: int = setting(
        1,
        "Number of models that are loaded at once; the least recently used one is unloaded for "
        "another. --check says whether more fit.",
        minimum=1,
        maximum=64,
    )
    keep_alive: str = setting(
        "",
        "Unload a model that had no request for this time, such as 5m; 0 at once, -1 never. By "
        "default never for a single model, and after 5m for several.",
    )
    files: str | None = setting(
        None,
        "Serve OpenAI's files and batches, stored in this folder; each key has its own files.",
    )
    files_limit: int = setting(
        1024, "Maximum size of the files of one key, in MiB.", minimum=1, maximum=1 << 24
    )
    max_per_key: int = setting(
        256, "Maximum number of requests of one key at once.", minimum=1, maximum=1_000_000
    )
    shared_prefixes: bool = setting(
        False, "Share the prefix cache between keys. Response times can then reveal prompts."
    )
    audit: str = setting(
        "",
        "Repeat this share of the requests, such as 1/1000, without speculation while the server "
        "is idle, and raise an alarm if a text differs that must be the same.",
    )
    drain_seconds: float = setting(
        30.0, "Seconds for running requests when the server ends.", minimum=0, maximum=3600
    )
    engine_home: str = setting(
        "process",
        "Run the engine in its own process, which is restarted if it ends or hangs, or in a thread "
        "of the server.",
        choices=("process", "thread"),
    )
    check: bool = setting(False, "Only show what would run, with its memory.")


@verb("top", "outrider.plugins.running.verbs:top")
class TopOptions(JsonOption):
    """Watch a running server on one screen.

    outrider top --url http://localhost:8000
    """

    url: str = setting("http://localhost:8000", "Address of the server, before /v1.")
    api_key: str = setting("", "The server's key; by default that of OUTRIDER_API_KEY.")
    interval: float = setting(2.0, "Seconds between updates.", minimum=0.5, maximum=3600)
    timeout: float = setting(5.0, "Seconds to wait for an answer.", minimum=0.1, maximum=3600)


@verb("ps", "outrider.plugins.running.verbs:ps", group="This machine")
class PsOptions(JsonOption):
    """List the servers that run here; `outrider stop` ends one.

    outrider ps
    """


@verb(
    "stop",
    "outrider.plugins.running.verbs:stop",
    Argument("SERVER", "Its model, port or process; may be left out if only one runs."),
)
class StopOptions(JsonOption):
    """Stop a server, after the requests that run.

    outrider stop 8000
    """

    timeout: float = setting(60.0, "Seconds to wait for its end.", minimum=0, maximum=86400)


@verb(
    "cluster config",
    "outrider.plugins.cluster.verbs:cluster_config",
    Argument("MODEL", "The model of each replica, as --target.", setting="target"),
    settings=ALL,
    without=(*DECIDED, "seed", "prediction", "prompt_logprobs"),
)
class ClusterConfigOptions(Options):
    """Write Ray Serve's configuration file for replicas of a model.

    outrider cluster config outrider/embedded --replicas 2
    """

    replicas: int = setting(2, "Engines, each in an actor.", minimum=1, maximum=4096)
    max_replicas: int = setting(
        0,
        "Maximum number of replicas, which Ray starts and stops by load; 0 is always --replicas.",
        minimum=0,
        maximum=4096,
    )
    gateways: int = setting(
        1, "HTTP servers in front of the engines, each in an actor.", minimum=1, maximum=256
    )
    host: str = setting(
        "127.0.0.1", "Listen at this address; one that others can reach needs an API key."
    )
    port: int = setting(8000, "Listen at this port.", minimum=1, maximum=65_535)
    api_key_file: str | None = setting(
        None, "File of API keys, one per line; it must exist on all nodes."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "Name of the model for clients; may be repeated. By default its name here."
    )
    allowed_host: tuple[str, ...] = setting(
        (), "Also answer under this name of the cluster; may be repeated."
    )
    allowed_origin: tuple[str, ...] = setting(
        (), "Allow web pages of this origin, such as https://chat.example; may be repeated."
    )
    max_queued: int = setting(
        0,
        "Maximum number of requests that wait at a gateway, 0 for four times --batch-size per "
        "replica. Further ones are refused, and may be repeated later.",
        minimum=0,
        maximum=1_000_000,
    )
    max_per_key: int = setting(
        256, "Maximum number of requests of one key at once.", minimum=1, maximum=1_000_000
    )
    shared_prefixes: bool = setting(False, "Share the prefix cache between keys.")
    drain_seconds: float = setting(
        30.0, "Seconds for running requests when a replica ends.", minimum=0, maximum=3600
    )


_TARGET = Argument(name="TARGET", text="An alias, a folder, a GGUF file or a hub id.")


MODEL = Argument(name="MODEL", text="A name from the list, a folder, a GGUF file or a hub id.")


@verb(
    "models pull, pull",
    "models:pull",
    Argument("TARGET", "A hub id, such as Qwen/Qwen3-8B."),
    group="Models",
)
class PullOptions(JsonOption):
    """Fetch a model from the hub, and its draft.

    outrider pull Qwen/Qwen3-8B
    """

    draft: str = setting(
        "auto",
        "Also fetch this draft model or these heads; auto is the draft of TARGET's pair in "
        "`outrider models pairs`, none fetches no draft.",
    )
    revision: str | None = setting(
        None, "A branch, tag or commit of TARGET; TARGET@REVISION says the same."
    )


@verb("models list, list", "models:list_models", group="Models")
class ListOptions(JsonOption):
    """List the models on this machine.

    outrider list --json
    """


STORE = Argument("FOLDER", "The folder of --prompt-store.")


@verb("cache list", "outrider.plugins.prompt_store.verbs:list_store", STORE)
class CacheListOptions(JsonOption):
    """List the models whose prompts a store has, and the bytes that they take.

    outrider cache list ~/prompts
    """


@verb("cache clear", "outrider.plugins.prompt_store.verbs:clear_store", STORE)
class CacheClearOptions(JsonOption):
    """Delete all prompts of a store.

    outrider cache clear ~/prompts
    """


@verb("cache verify", "outrider.plugins.prompt_store.verbs:verify_store", STORE)
class CacheVerifyOptions(JsonOption):
    """Check every byte of a store, and delete damaged files; the exit status is 1 if any was.

    outrider cache verify ~/prompts
    """


@verb(
    "models pairs, pairs",
    "models:pairs",
    Argument("NAME", "Show this pair's models, memory and command."),
)
class PairsOptions(JsonOption):
    """List known pairs of target and draft, or show one.

    outrider models pairs gpt2_dev
    """


@verb("models inspect", "models:inspect_model", MODEL)
class InspectOptions(JsonOption):
    """Print a model's sizes from its config.json, without loading weights.

    outrider models inspect outrider/embedded
    """
