"""Writes the reference pages of the site: `.venv/bin/python scripts/reference_pages.py`.

The command line's is made of the table of verbs, that of settings of their registry, HTTP's of the
server's OpenAPI document, and that of metrics of what the server exposes. They go to build/pages,
which git ignores: scripts/docs_pages.py takes them from there, as if they were in docs/.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from types import SimpleNamespace
from typing import Any, cast

import settings_page

from outrider.cli.options import Verb, setting_flags
from outrider.cli.verbs import GROUPS, VERBS
from outrider.core.fields import meta_of
from outrider.core.params import SamplingParams
from outrider.core.settings import SETTINGS, Setting
from outrider.plugins.batches.batches import BATCH_BODIES, batch_routes
from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server.app import all_routes, document
from outrider.server.port import EngineStatus

FOLDER = Path(__file__).resolve().parent.parent / "build" / "pages"
TITLES = {"program": "models and output", "engine": "the engine", "sampling": "sampling"}
ANCHORS = {"program": "models-and-output", "engine": "engine", "sampling": "sampling"}
Schema = Mapping[str, Any]
# Bodies that ask for text.
WRITING = ("ChatBody", "CompletionBody", "ResponseBody", "MessageBody")
HELPS = {item.name: meta_of(item).help for item in fields(SamplingParams)}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", *parts]) + "\n"


def prose(text: str) -> str:
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)


# The command line


def command_line() -> str:
    listed = [(group, [verb for verb in VERBS if verb.group == group]) for group in GROUPS]
    older = [verb for verb in VERBS if not verb.group]
    parts = [
        prose(
            "Every verb of `outrider`, with its own options. Most verbs also take settings, whose "
            "flags, values and defaults are on [a page of their own](../settings.md). "
            "`outrider VERB --help` shows the options of daily use, `--help-all` all of them, "
            "`--help WORD` those that a word occurs in. Results go to stdout; notes, progress and "
            "errors to stderr."
        ),
        table(
            ("exit code", "means"),
            (
                ("0", "done"),
                ("1", "a check failed, or a defect of Outrider"),
                ("2", "bad input"),
                ("3", "bad files or machine"),
                ("130", "interrupted"),
            ),
        ),
    ]
    for title, verbs in [*listed, ("Others", older)]:
        parts.append(f"## {title}")
        for verb in verbs:
            parts += verb_parts(verb, [verb.name])
    return page("Command line", *parts)


def verb_parts(verb: Verb, path: list[str]) -> Iterator[str]:
    if not verb.text:
        return
    names = (f"[{item.name}{' ...' if item.many else ''}]" for item in verb.arguments)
    usage = " ".join(["outrider", *path, *(["VERB"] if verb.parts else ["[OPTIONS]", *names])])
    yield f"### outrider {' '.join(path)}"
    also = f" Also `outrider {verb.alias}`." if verb.alias else ""
    yield prose(f"{verb.text}{also}")
    yield f"```\n{verb.example}\n```"
    if verb.parts:
        for part in verb.parts:
            yield from verb_parts(part, [*path, part.name])
        return
    yield f"Usage: `{usage}`"
    rows = [
        (
            f"`{item.name}`",
            item.text + (f" One of {choices(item.choices)}." if item.choices else ""),
        )
        for item in verb.arguments
    ]
    rows += [(usage_of(item), plain(item.meta.help)) for item in verb.own_options()]
    if rows:
        yield table(("argument or option", "what"), rows)
    if verb.settings:
        yield settings_of(verb)


def choices(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def plain(text: str) -> str:
    """What would be a link, an emphasis or a tag in Markdown, as it is written."""
    return text.replace("[", "\\[").replace("*", "\\*").replace("<", "\\<")


def usage_of(item: Setting) -> str:
    flags = ", ".join(f"`{flag}`" for flag in setting_flags(item))
    return flags if item.kind is bool else f"{flags} {item.metavar}"


def settings_of(verb: Verb) -> str:
    groups = [f"[{TITLES[name]}](../settings.md#{ANCHORS[name]})" for name in verb.settings]
    taken = {item.name for item in verb.offered_settings()}
    without = [
        f"`{item.flag}`"
        for item in SETTINGS.values()
        if item.group in verb.settings and item.name not in taken
    ]
    but = f", but for {', '.join(without)}" if without else ""
    return prose(f"Settings of {' and '.join(groups)}{but}. `--config FILE`, `--set KEY=VALUE`.")


# HTTP


def http() -> str:
    """Routes are described, none is called, so there is no server behind them."""
    nothing = cast("Any", SimpleNamespace(site=None, files=None, uses=None))
    routes = all_routes(cast("Any", None), [*metric_routes(Metrics(dict)), *batch_routes(nothing)])
    found = json.loads(document(routes, BATCH_BODIES))
    schemas: Mapping[str, Schema] = found["components"]["schemas"]
    paths: list[tuple[str, str, str]] = []
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody")
            sent = cast("Schema", body["content"] if body else {})
            name = ref(sent["application/json"]["schema"]) if "application/json" in sent else ""
            answer = operation["responses"].get("200", {}).get("content", {})
            paths.append(
                (
                    f"`{method.upper()} {path}`",
                    f"[{name}](#{name.lower()})" if name else choices(list(sent)),
                    choices(list(answer)),
                )
            )
    parts = [
        prose(
            "The paths of `outrider serve` and the bodies that they read, from the document that "
            "it answers at `GET /openapi.json`, which has the answers' schemas too. What they "
            "mean, and what is done with a field that is not known, is on the page of "
            "[the server](../server.md); tools, Responses and Messages are on that of "
            "[tools](../tools.md)."
        ),
        table(("path", "body", "answers with 200"), paths),
        prose(
            "An error is an object with `message`, `type`, `param` and `code` under `error`, in "
            "the shape of the API that was asked."
        ),
    ]
    bodies = {
        name: schema["properties"]
        for name, schema in schemas.items()
        if name not in ("Error", "MessageError") and schema.get("properties")
    }
    writing = [bodies[name] for name in WRITING]
    shared = {name for name in writing[0] if all(name in one for one in writing)}
    header = ("field", "type", "what")
    needed = schemas[WRITING[0]].get("required", ())
    parts += ["## Fields of every request for text"]
    parts += [table(header, list(body_rows(writing[0], needed, shared)))]
    for name, properties in bodies.items():
        schema = schemas[name]
        parts.append(f"## {name}")
        if "description" in schema:
            parts.append(prose(schema["description"]))
        if name in WRITING:
            parts.append("Besides [those of every request](#fields-of-every-request-for-text):")
        own = properties.keys() - (shared if name in WRITING else ())
        parts.append(table(header, list(body_rows(properties, schema.get("required", ()), own))))
    return page("HTTP", *parts)


def body_rows(
    properties: Schema, required: Sequence[str], shown: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Of the fields that are `shown`, in the schema's order."""
    for name, field in properties.items():
        if name not in shown:
            continue
        bounds = [
            f"{words} {field[key]:,}"
            for key, words in (("minimum", "at least"), ("maximum", "at most"))
            if key in field
        ]
        needed = "needed" if name in required else ""
        said = "; ".join(word for word in (needed, *bounds) if word)
        text = " ".join(word for word in (HELPS.get(name, ""), f"({said})" if said else "") if word)
        yield f"`{name}`", type_of(field), text


def ref(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def type_of(schema: Schema) -> str:
    if "$ref" in schema:
        return f"[{ref(schema)}](#{ref(schema).lower()})"
    if "anyOf" in schema:
        kinds = [type_of(kind) for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return choices([str(value) for value in schema["enum"]])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    return str(kind)


# Metrics


def metrics() -> str:
    rows = [
        (
            f"`{family.name}{'_total' if family.type == 'counter' else ''}`",
            family.type,
            choices(vars(family)["_labelnames"]),
            family.documentation,
        )
        for family in Metrics(lambda: cast("Mapping[str, EngineStatus]", {})).collect()
    ]
    return page(
        "Metrics",
        prose(
            "What `GET /metrics` of `outrider serve` says, in Prometheus' text format. Names end "
            "as vLLM's where they mean the same, so a board for vLLM fits with another prefix; "
            "one for Grafana [is there](../playground.md#prometheus-and-grafana). No label takes a "
            "value from a request. `--open-metrics` lets a scraper in without a key."
        ),
        table(("name", "kind", "labels", "what"), rows),
    )


def pages() -> dict[str, str]:
    """The text of every written page, by its path in the site."""
    return {
        "settings.md": settings_page.render(),
        "reference/cli.md": command_line(),
        "reference/http.md": http(),
        "reference/metrics.md": metrics(),
    }


def main() -> None:
    for name, text in pages().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
