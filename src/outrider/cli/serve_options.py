"""Options of `outrider serve` and of `outrider cluster`."""

from __future__ import annotations

from outrider.cli.options import ALL, DECIDED, Argument, JsonOption, Options, ReplicasOption, verb
from outrider.core.fields import setting


@verb(
    "serve",
    "serve:serve",
    Argument(
        "MODEL",
        "What to serve, as --target; or NAME=MODEL, or NAME=MODEL,DRAFT. Of several, the first is "
        "loaded at once, the others when they are asked for.",
        setting="target",
        many=True,
    ),
    group="Write text",
    settings=ALL,
    without=(*DECIDED, "seed", "prediction", "prompt_logprobs"),
)
class ServeOptions(ReplicasOption, JsonOption):
    """Answer OpenAI's API over HTTP, to many clients at once.

    outrider serve outrider/embedded --check
    """

    host: str = setting(
        "127.0.0.1", "Listen at this address; one that others can reach needs an API key."
    )
    port: int = setting(8000, "Listen at this port; 0 takes a free one.", minimum=0, maximum=65_535)
    health_port: int = setting(
        0,
        "Answer /health, /ready and /metrics at this port too, whose connections nobody else can "
        "use up; 0 is none.",
        minimum=0,
        maximum=65_535,
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Ask clients for this key, which `ps` shows to all users of this machine; --api-key-file "
        "hides it. May be repeated.",
    )
    api_key_file: str | None = setting(
        None,
        "Ask clients for a key of this file, one a line, perhaps with its share of the server "
        "behind it (1).",
    )
    open_metrics: bool = setting(
        False, "Tell /metrics without a key, as to gateways that read it and have none."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "What clients call the model; may be repeated. By default as it is named here."
    )
    allowed_host: tuple[str, ...] = setting(
        (), "Also answer under this name of the machine; may be repeated."
    )
    allowed_origin: tuple[str, ...] = setting(
        (), "Let web pages of this origin ask, as https://chat.example; may be repeated."
    )
    ssl_certfile: str | None = setting(None, "Serve HTTPS with this certificate chain, in PEM.")
    ssl_keyfile: str | None = setting(None, "The certificate's private key, in PEM.")
    max_queued: int = setting(
        0,
        "Requests that may wait for a place; 0 is four times as many as run at once. One more is "
        "told to ask again.",
        minimum=0,
        maximum=1_000_000,
    )
    greedy: bool = setting(
        False,
        "Take the likeliest token always where a request does not name its sampling, whatever the "
        "checkpoint advises.",
    )
    max_loaded_models: int = setting(
        1,
        "Of several models, so many are loaded at once; the one that was not used for longest "
        "makes way. --check says whether more fit.",
        minimum=1,
        maximum=64,
    )
    keep_alive: str = setting(
        "",
        "Unload a model that had no request for so long, as 5m; 0 at once, -1 never. By default "
        "never for a single model, and after 5m of several.",
    )
    files: str | None = setting(
        None,
        "Take files and batches, as OpenAI's API has them, and keep them in this folder; each key "
        "has its own.",
    )
    files_limit: int = setting(
        1024, "MiB of files that a key may have.", minimum=1, maximum=1 << 24
    )
    max_per_key: int = setting(256, "Requests of one key at once.", minimum=1, maximum=1_000_000)
    shared_prefixes: bool = setting(
        False,
        "Let clients of different keys share what was read of prompts that begin alike; one can "
        "then learn by the clock what another asked.",
    )
    audit: str = setting(
        "",
        "Run this share of the requests, as 1/1000, again without speculation while nobody asks, "
        "and alarm if a text that must be the same is another.",
    )
    drain_seconds: float = setting(
        30.0, "Let requests that run end for so long when the server ends.", minimum=0, maximum=3600
    )
    engine_home: str = setting(
        "process",
        "Run the engine in a process of its own, which is started anew should it end or hang, or "
        "in a thread of the server.",
        choices=("process", "thread"),
    )
    check: bool = setting(False, "Say what would run, with its memory, and end.")


@verb("top", "top:top")
class TopOptions(JsonOption):
    """Watch a running server on one screen.

    outrider top --url http://localhost:8000
    """

    url: str = setting("http://localhost:8000", "Address of the server, before /v1.")
    api_key: str = setting("", "The server's key; by default that of OUTRIDER_API_KEY.")
    interval: float = setting(2.0, "Seconds between looks.", minimum=0.5, maximum=3600)
    timeout: float = setting(5.0, "Seconds to wait for an answer.", minimum=0.1, maximum=3600)


@verb(
    "cluster config",
    "cluster:config",
    Argument("MODEL", "What each replica runs, as --target.", setting="target"),
    settings=ALL,
    without=(*DECIDED, "seed", "prediction", "prompt_logprobs"),
)
class ClusterConfigOptions(Options):
    """Write the file that Ray Serve runs replicas of a model by.

    outrider cluster config outrider/embedded --replicas 2
    """

    replicas: int = setting(2, "Engines, each in an actor.", minimum=1, maximum=4096)
    max_replicas: int = setting(
        0,
        "Let Ray start so many when requests wait, and end them again; 0 keeps to --replicas.",
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
        None, "Ask clients for a key of this file, which is there on all nodes, one a line."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "What clients call the model; may be repeated. By default as it is named here."
    )
    allowed_host: tuple[str, ...] = setting(
        (), "Also answer under this name of the cluster; may be repeated."
    )
    allowed_origin: tuple[str, ...] = setting(
        (), "Let web pages of this origin ask, as https://chat.example; may be repeated."
    )
    max_queued: int = setting(
        0,
        "Requests that may wait at a gateway; 0 is four times --batch-size a replica. One more is "
        "told to ask again.",
        minimum=0,
        maximum=1_000_000,
    )
    max_per_key: int = setting(256, "Requests of one key at once.", minimum=1, maximum=1_000_000)
    shared_prefixes: bool = setting(
        False, "Let clients of different keys share what was read of prompts that begin alike."
    )
    drain_seconds: float = setting(
        30.0, "Let requests that run end for so long when a replica ends.", minimum=0, maximum=3600
    )
