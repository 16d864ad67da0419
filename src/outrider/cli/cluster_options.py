"""What `outrider cluster` may be told."""

from __future__ import annotations

from outrider.cli.options import ALL, DECIDED, Argument, Options, verb
from outrider.core.fields import setting


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
