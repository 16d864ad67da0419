"""Access control in front of the application: API keys, hosts, origins, and sizes of requests.

The application never sees a refused request. Access depends on the path of the connection alone,
never on a URL built from headers. Every path needs a key unless it is listed as public. Any web
page can make a browser send requests to a server on this machine, so Host and Origin are checked
against those that are allowed.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.errors import ConfigError, reason_of
from outrider.core.files import FileKind, read_text
from outrider.server.errors import ApiError, error_response
from outrider.server.site import Limits

MIN_KEY_CHARS = 16
# The path to which clients upload files.
FILES = "/v1/files"
_SLASHES = re.compile("/+")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# Load balancers request these in HTTP/1.0, without a Host header. Browsers always send one.
_PROBES = frozenset({"/health", "/ready"})
PUBLIC = _PROBES | {"/", "/dashboard"}
# Files of the browser's pages, which hold no secret.
PUBLIC_FOLDERS = ("/web/",)
# A name or an address, and perhaps a port: no user, no path, no space.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{0,5})?", re.IGNORECASE)
# Headers that a request may have only once: with two, it would be unclear which one counts.
_SINGLE = frozenset({b"host", b"content-length", b"transfer-encoding", b"content-type", b"origin"})
_POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"),
        *("img-src 'self' data:", "base-uri 'none'", "form-action 'none'"),
        "frame-ancestors 'none'",
    )
)
_SAFETY = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", _POLICY.encode()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorRules:
    """Rules of access. Requests need one of `keys`; without keys, all requests are accepted, which
    only a server on the loopback may do. `hosts` and `origins` are allowed in addition to the
    server's own. `public` paths and those below `public_folders` need no key."""

    keys: Collection[str] = ()
    host: str = "127.0.0.1"
    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    public: Collection[str] = PUBLIC
    public_folders: Sequence[str] = PUBLIC_FOLDERS
    digests: Mapping[bytes, str] = field(init=False)

    def __post_init__(self) -> None:
        short = [key for key in self.keys if len(key) < MIN_KEY_CHARS]
        if short:
            raise ConfigError(
                f"an API key has {len(short[0])} characters; it needs {MIN_KEY_CHARS}.",
                hint="python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
        if not self.keys and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from other machines, and no API key is required.",
                hint="--api-key-file FILE, or --host 127.0.0.1",
            )
        digests = {_digest(key): name_of(key) for key in self.keys}
        object.__setattr__(self, "digests", digests)


def name_of(key: str) -> str:
    """Return the name of a key, for uses in which the key itself must stay secret."""
    return _digest(key).hex()[:12]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Door:
    """An ASGI middleware with these rules. It calls `refused` with status and path of an error."""

    def __init__(
        self,
        app: ASGIApp,
        rules: DoorRules,
        limits: Limits,
        refused: Callable[[int, str], None] | None = None,
    ) -> None:
        self._app, self._rules, self._limits = app, rules, limits
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await _close(send)
            return
        headers = _read_headers(scope)
        path = _SLASHES.sub("/", scope["path"]).removesuffix("/")
        if path.startswith("/v1/"):
            # Clients may append their path to a base URL that ends in a slash.
            scope["path"] = path
        origin = headers.get("origin", "")
        scope["outrider.request_id"] = uuid4().hex
        guarded = self._guarded(scope, send, self._allowed_origin(origin))
        try:
            self._check_size(scope)
            _check_framing(scope, headers)
            if "host" in headers or scope["path"] not in _PROBES:
                self._check_host(headers)
            self._check_origin(scope, headers)
            if scope["method"] == "OPTIONS" and self._allowed_origin(origin):
                await _preflight(guarded)
                return
            scope["outrider.key"] = self._key(scope["path"], headers)
            limits = self._limits
            if scope["path"] == FILES and limits.file_bytes:
                size = limits.file_bytes + limits.body_bytes
                limits = replace(limits, body_bytes=size, body_seconds=600.0)
            _check_body(scope, headers, limits)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, guarded)
            return
        # Starlette has answered and logged the error, and raises it again for servers.
        with suppress(Exception):
            await self._app(scope, _bounded(receive, limits), guarded)

    def _check_size(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size + len(scope["raw_path"] or b"") + len(scope["query_string"]) > (
            self._limits.header_bytes
        ):
            raise ApiError(431, "the headers are too long.", code="headers_too_large")

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse names that another site could have pointed at this machine (DNS rebinding)."""
        name = _host_name(headers.get("host", ""))
        rules = self._rules
        if name in _LOCAL_NAMES or name in rules.hosts or name == rules.host:
            return
        if not is_loopback(rules.host) and _is_address(name):
            # An address needs no DNS, so it cannot be rebound.
            return
        raise ApiError(
            403,
            f"the host {name[:100]!r} is not served. Start the server with --allowed-host NAME.",
            code="host_not_allowed",
        )

    def _check_origin(self, scope: Scope, headers: Mapping[str, str]) -> None:
        origin = headers.get("origin")
        if origin is None or self._allowed_origin(origin):
            return
        own = f"{scope['scheme']}://{headers.get('host', '')}"
        if origin.lower() != own.lower():
            raise ApiError(
                403,
                f"pages of {origin[:100]!r} may not access this server. Start it with "
                "--allowed-origin ORIGIN.",
                code="origin_not_allowed",
            )

    def _allowed_origin(self, origin: str) -> str:
        return origin if origin and origin in self._rules.origins else ""

    def _key(self, path: str, headers: Mapping[str, str]) -> str:
        """Return the name of the request's key. Raises ApiError for a wrong or a missing key."""
        rules = self._rules
        kind, _, shown = headers.get("authorization", "").partition(" ")
        shown = shown.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        given, found = _digest(shown), ""
        for digest, name in rules.digests.items():
            if hmac.compare_digest(digest, given):
                found = name
        if found or not rules.digests or path in rules.public:
            return found
        if any(path.startswith(folder) for folder in rules.public_folders):
            return found
        problem = "the API key is wrong" if shown else "no API key"
        raise ApiError(
            401,
            f"{problem}. Send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'.",
            code="invalid_api_key",
        )

    def _guarded(self, scope: Scope, send: Send, origin: str) -> Send:
        """Return `send` extended: it adds security headers and a request id to each response."""
        more = [*_SAFETY, (b"x-request-id", scope["outrider.request_id"].encode())]
        if origin:
            shared = (b"access-control-allow-origin", origin.encode("latin-1"))
            more += [shared, (b"vary", b"origin")]

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = list(message.get("headers", ()))
                engine_of: Callable[[], int | None] = scope.get("outrider.engine", lambda: None)
                if (engine := engine_of()) is not None:
                    own.append((b"x-outrider-engine", b"%d" % engine))
                named = {name.lower() for name, _ in own}
                message["headers"] = own + [pair for pair in more if pair[0] not in named]
                if message["status"] >= 400 and self._refused is not None:
                    self._refused(message["status"], scope["path"])
            await send(message)

        return guarded


def _read_headers(scope: Scope) -> dict[str, str]:
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def _check_framing(scope: Scope, headers: Mapping[str, str]) -> None:
    """Check the framing of the body. Raises ApiError for headers that a proxy could interpret in
    another way than this server (request smuggling)."""
    names = [name.lower() for name, _ in scope["headers"] if name.lower() in _SINGLE]
    if len(names) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1).decode()
        raise ApiError(400, f"there are two headers {twice!r}. Send one.", code="repeated_header")
    coding = headers.get("transfer-encoding", "chunked").strip().lower()
    if coding != "chunked":
        raise ApiError(
            501,
            f"the transfer coding {coding[:60]!r} is not read. Send 'chunked' or a length.",
            code="unsupported_encoding",
        )
    if {"transfer-encoding", "content-length"} <= headers.keys():
        raise ApiError(400, "the body has a length and is chunked. Send one.", code="bad_body")


def _host_name(host: str) -> str:
    """Return the name or address of a Host header, in lower case; empty if it is malformed."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _check_body(scope: Scope, headers: Mapping[str, str], limits: Limits) -> None:
    if scope["method"] != "POST":
        return
    length = headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 15 or int(length) > limits.body_bytes):
        raise _too_large(limits)
    if headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not read.", code="unsupported_encoding")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    wanted = "multipart/form-data" if scope["path"] == FILES else "application/json"
    if kind != wanted and (kind or not scope["path"].endswith("/cancel")):
        words = f"the body is {kind[:60] or 'of no type'!r}. Send 'Content-Type: {wanted}'."
        raise ApiError(415, words, code="unsupported_media_type")


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        413, f"the body has more than {limits.body_bytes:,} bytes.", code="body_too_large"
    )


def _bounded(receive: Receive, limits: Limits) -> Receive:
    """Return `receive` extended: it raises ApiError for a body that is too long or too slow."""
    loop = asyncio.get_running_loop()
    num_bytes, is_read = 0, False
    # The time limit begins when the server first reads the body.
    deadline: float | None = None

    async def bounded() -> Message:
        nonlocal num_bytes, is_read, deadline
        if is_read:
            return await receive()
        deadline = deadline or loop.time() + limits.body_seconds
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body was not received within {limits.body_seconds:g} s.",
                code="body_timeout",
            ) from None
        num_bytes += len(message.get("body", b""))
        if num_bytes > limits.body_bytes:
            raise _too_large(limits)
        is_read = not message.get("more_body", False)
        return message

    return bounded


async def _preflight(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
        (b"access-control-allow-headers", b"authorization, content-type, x-api-key"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _close(send: Send) -> None:
    """Close a web socket: this server has none."""
    await send({"type": "websocket.close", "code": 1008})


def read_keys(name: str | None) -> dict[str, float]:
    """Return the weight of each key; empty without a file. Raises ConfigError."""
    if name is None:
        return {}
    try:
        lines = read_text(Path(name), FileKind.SETTINGS).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}.", hint="one key a line") from None
    found: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        key, *share = line.split() or ["#"]
        if key.startswith("#"):
            continue
        try:
            found[key] = float(*share or [1])
        except (TypeError, ValueError):
            found[key] = 0
        if not 0.001 <= found[key] <= 1000:
            raise ConfigError(
                f"{name}, line {number}: the share of a key is a number from 0.001 to 1000.",
                hint="KEY, or KEY SHARE",
            )
    if not found:
        raise ConfigError(f"{name}: there is no key in it.", hint="one key a line")
    return found


# Nothing is bound here: a server that listens everywhere also answers at the loopback.
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Host and port to listen at. Port 0 means any free port. With a certificate, TLS is used."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    private_key: Path | None = None
    health_port: int = 0
    """A second port for monitoring; 0 means none."""

    @property
    def health(self) -> Address | None:
        return replace(self, port=self.health_port, health_port=0) if self.health_port else None

    @property
    def is_everywhere(self) -> bool:
        """True if the server listens at every address of the machine."""
        return self.host in _LOOPBACKS

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        scheme = "https" if self.certificate else "http"
        host = _LOOPBACKS.get(self.host, self.host)
        name = f"[{host}]" if ":" in host else host
        return f"{scheme}://{name}:{self.port}"


def reserved(address: Address) -> tuple[Address, socket.socket]:
    """Return the address with its actual port, and a socket that reserves the port while the
    server starts. Raises ConfigError if another program listens there."""
    # First bound without port sharing: two servers that share a port would not notice each other.
    held = _bound(address, shared=False)
    address = replace(address, port=held.getsockname()[1])
    held.close()
    return address, _bound(address, shared=True)


def _bound(address: Address, *, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((address.host, address.port))
    except OSError as error:
        held.close()
        raise _not_bound(address, error) from None
    return held


def _not_bound(address: Address, error: OSError) -> ConfigError:
    where = f"{address.host}:{address.port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{where}: another program listens there.",
            hint="--port with another number; --port 0 takes a free one",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"{where}: only root may listen there.", hint="--port 8000")
    return ConfigError(f"{where}: {reason_of(error)}.", hint="--host 127.0.0.1")
