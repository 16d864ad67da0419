"""Hugging Face hub: lists a model's files there and in the local cache, and resumes downloads.

The cache is the documented one of `huggingface_hub`: for each repository, `blobs/` has files by the
hash of their content, `snapshots/COMMIT/` names them, and `refs/` maps a name to a commit. This
module fetches large files, one after the other, so that a stopped download is resumed and its hash
checked; `huggingface_hub` fetches the small ones and adds all files to its cache. A hub may send
more than it announced, so a download ends at the announced size.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, TypeVar, cast

from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_url,
    snapshot_download,  # pyright: ignore[reportUnknownVariableType]
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import (
    http_get,  # pyright: ignore[reportUnknownVariableType]
    repo_folder_name,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
)
from huggingface_hub.utils import tqdm as hub_bar

from outrider.core.errors import CheckpointError, MachineError, OutriderError, reason_of, words_of
from outrider.core.files import FileKind, open_regular, read_text
from outrider.models.checkpoint import INDEX, PICKLES
from outrider.models.json_object import JsonObject
from outrider.models.names import (
    GGUF,
    HUB_FILES,
    HUB_NOISE,
    HubName,
    chosen_gguf,
    tags_of,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
# The version of huggingface_hub decides which library's error its client raises for a server that
# cannot be reached; this is the errors' common base.
_HttpError: type[Exception] = next(
    kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"
)
# Errors of a disk or of the rights to it; all others are errors of the network.
_OF_DISKS = frozenset((
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM,
    errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
))  # fmt: skip
# Bytes that small files may have beyond their announced sizes.
_MORE_BYTES = 1 << 20

Report = Callable[[int], object]


class HubUnreachableError(CheckpointError):
    """The hub did not respond: no network, a wrong address, or offline mode."""


def store_of(name: HubName) -> Path:
    """The repository's folder in the cache, which may not exist yet."""
    folder = repo_folder_name(repo_id=name.repo, repo_type="model")
    return Path(constants.HF_HUB_CACHE).expanduser() / folder


@contextmanager
def explained(name: HubName) -> Generator[None]:
    """Turn errors that the hub's client raises within the block into errors with a hint."""
    try:
        yield
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name.repo} is gated: its authors want to know who uses it.",
            hint=f"accept its licence at {constants.ENDPOINT}/{name.repo}, then {LOGIN}, and "
            "repeat the command",
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name.repo} has no revision {name.revision!r}.",
            hint=f"{constants.ENDPOINT}/{name.repo}/commits/main lists its branches and commits",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"the hub knows no model {name.repo}, or does not show it to you.",
            hint=f"look its name up at {constants.ENDPOINT}/models; for a private one {LOGIN}",
        ) from error
    except OfflineModeIsEnabled as error:
        raise HubUnreachableError(
            f"{name} is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it.",
            hint="set HF_HUB_OFFLINE=0; `outrider models list` shows what is on this machine",
        ) from error
    except HfHubHTTPError as error:
        raise _refused(name, error) from error
    except (_HttpError, OSError) as error:
        raise _failed(name, error) from error
    except OutriderError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # The client does not check that a response is well formed.
        raise nonsense(name, f"{type(error).__name__}: {words_of(error)}") from error


def nonsense(name: HubName, what: str) -> CheckpointError:
    return CheckpointError(
        f"{constants.ENDPOINT} gives an answer about {name} that makes no sense ({what}).",
        hint="is HF_ENDPOINT a hub that can be trusted? Unset, it is https://huggingface.co",
    )


def _refused(name: HubName, error: HfHubHTTPError) -> CheckpointError:
    status = error.response.status_code
    if status in (401, 403):
        return CheckpointError(
            f"the hub does not give {name.repo} to the token that it was shown ({status}).",
            hint=LOGIN,
        )
    return HubUnreachableError(
        f"the hub cannot answer about {name.repo} now ({status}).",
        hint="repeat the command later; what was fetched is kept",
    )


def _failed(name: HubName, error: Exception) -> CheckpointError | MachineError:
    if isinstance(error, OSError) and error.errno in _OF_DISKS:
        return MachineError(
            f"the cache of models, {constants.HF_HUB_CACHE}, cannot be written: "
            f"{reason_of(error)}.",
            hint="free some space there, or set HF_HOME to a folder on another disk",
        )
    reason = (str(error) or type(error).__name__).splitlines()[0]
    heard = isinstance(error, (ConnectionResetError, ConnectionAbortedError, BrokenPipeError))
    what = "broke off" if heard else "cannot be reached"
    return HubUnreachableError(
        f"{name} cannot be fetched: {constants.ENDPOINT} {what} ({reason}).",
        hint="repeat the command when there is a network, which goes on where this one stopped; "
        "`outrider models list` shows what is on this machine",
    )


def hidden_bar(name: HubName, most: int) -> type[hub_bar]:
    """A class for the client's progress bar: draws nothing, ends a download after `most` bytes."""

    class Hidden(hub_bar):
        come = 0.0

        def __init__(self, *args: Any, **options: Any) -> None:
            hidden = options | {"disable": True}
            super().__init__(*args, **hidden)  # pyright: ignore[reportUnknownMemberType]

        def update(self, n: float | None = 1) -> bool | None:
            self.come += n or 0
            if self.come > most + _MORE_BYTES:
                raise _too_much(name, most)
            return super().update(n)

    return Hidden


class ByteBar:
    """The client's progress bar: reports bytes; ends a download before it exceeds `most`."""

    def __init__(self, name: HubName, report: Report, most: int) -> None:
        self._name, self._report, self._most = name, report, most
        self._left = most

    def update(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise _too_much(self._name, self._most)
        self._report(num_bytes)


def _too_much(name: HubName, most: int) -> CheckpointError:
    return nonsense(name, f"more than the {most:,} bytes that it announced")


# Seconds for a connection, for the first response, and without one until a wait is said.
_CONNECTION, PATIENCE, _SILENCE = 5.0, 10.0, 1.0
# Seconds for which a hub that did not respond is not asked again.
_REST = 30.0
# What the client takes as the timeout of a request: that of the connection, and of each answer.
TIMEOUT = cast("Any", (_CONNECTION, PATIENCE))
# When the hub at an address did not respond.
_unreached: dict[str, float] = {}


def asked(name: HubName, ask: Callable[[], T]) -> T:
    """Return what `ask` hears from the hub about `name`, within PATIENCE seconds. To look up the
    hub's address has no timeout, so another thread asks. Raises HubUnreachableError, and as
    `explained` does."""
    hub = constants.ENDPOINT
    if monotonic() < _unreached.get(hub, -_REST) + _REST:
        raise _failed(name, TimeoutError(f"it did not answer within the last {_REST:.0f} s"))
    heard: Future[T] = Future()

    def run() -> None:
        try:
            heard.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - raised where it is read
            heard.set_exception(error)

    Thread(target=run, daemon=True).start()
    if not wait([heard], _SILENCE).done:
        _log.warning("%s is asked about %s, for %.0f s at most.", hub, name, PATIENCE)
    try:
        with explained(name):
            if not wait([heard], PATIENCE - _SILENCE).done:
                raise TimeoutError(f"no answer in {PATIENCE:.0f} s")
            return heard.result()
    except HubUnreachableError as error:
        if not isinstance(error.__cause__, HfHubHTTPError | OfflineModeIsEnabled):
            _unreached[hub] = monotonic()
        raise


_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file on the hub; `blob` is its name in the cache, the SHA-256 of a `large` file."""

    name: str
    num_bytes: int
    blob: str
    large: bool


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub at one commit, with the `files` that loading reads. The name of a GGUF
    model has the quantisation that was chosen."""

    name: HubName
    commit: str
    files: tuple[HubFile, ...]

    def path(self, folder: Path) -> Path:
        """The path of the model in the folder of its commit: the first of its GGUF files, or the
        folder."""
        return folder / self.files[0].name if self.is_gguf else folder

    @property
    def is_gguf(self) -> bool:
        return bool(self.files) and self.files[0].name.endswith(GGUF)

    def missing(self) -> list[HubFile]:
        """The files that the cache does not have under this model's name."""
        return [file for file in self.files if not self._is_here(file)]

    def bytes_to_fetch(self) -> int:
        """Bytes that the cache lacks; a part of a stopped download counts as present."""
        return sum(max(0, file.num_bytes - self.bytes_here(file)) for file in self.missing())

    def bytes_here(self, file: HubFile) -> int:
        """Bytes of a file in the cache, complete or partial; small files are never partial."""
        for path in (self.blob(file), self.part(file)):
            if path.exists():
                return path.stat().st_size
        return 0

    def blob(self, file: HubFile) -> Path:
        return store_of(self.name) / "blobs" / file.blob

    def part(self, file: HubFile) -> Path:
        """The path of a partial download."""
        return store_of(self.name) / "blobs" / f"{file.blob}.incomplete"

    def _is_here(self, file: HubFile) -> bool:
        found = try_to_load_from_cache(self.name.repo, file.name, revision=self.name.revision)
        return isinstance(found, str) and self.commit in Path(found).parts


def look(name: HubName) -> HubModel:
    """Look a model up on the hub, in one request (two for a gated model).

    Raises HubUnreachableError; CheckpointError if the model is unknown or gated, has no files that
    we read, or has a large file without a hash.
    """

    def ask() -> ModelInfo:
        api = HfApi()
        info = api.model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=TIMEOUT
        )
        if info.gated:
            api.auth_check(name.repo)
        return info

    info = asked(name, ask)
    found = info.siblings or ()
    names = [item.rfilename for item in found]
    read = [one for one in names if _is_read(one)]
    if name.tag or (not any(one.endswith(".safetensors") for one in read) and tags_of(names)):
        tag, read = chosen_gguf(name, names)
        name = replace(name, tag=tag)
    else:
        _check_readable(name, names, read)
    items = {item.rfilename: item for item in found}
    return HubModel(name, info.sha or "", tuple(_file(name, items[one]) for one in read))


def _file(name: HubName, item: RepoSibling) -> HubFile:
    """A file as the hub describes it. The hash of a large file becomes the name of a local file, so
    this raises CheckpointError for a malformed hash, and for an impossible name or size."""
    parts = item.rfilename.replace("\\", "/").split("/")
    size = cast("object", item.size)
    if (
        not parts
        or {"..", "/"} & {*parts}
        or not (size is None or (isinstance(size, int) and size >= 0))
    ):
        raise nonsense(name, f"a file {item.rfilename[:80]!r} of {size!r} bytes")
    blob = (item.lfs.sha256 if item.lfs else item.blob_id) or ""
    if item.lfs and _SHA256.fullmatch(blob) is None:
        raise CheckpointError(
            f"{constants.ENDPOINT} gives no SHA-256 for {item.rfilename} of {name}.",
            hint="is HF_ENDPOINT a hub that can be trusted? Unset, it is https://huggingface.co",
        )
    return HubFile(item.rfilename, item.size or 0, blob, large=item.lfs is not None)


def local_copy(name: HubName) -> Path | None:
    """The folder of a model, or its GGUF file, if the cache holds all of it, as far as the cache
    alone shows."""
    file = local_gguf(name)
    if file is not None or name.tag:
        return file
    with suppress(LocalEntryNotFoundError, HFValidationError, CheckpointError):
        folder = Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=HUB_FILES,
                ignore_patterns=HUB_NOISE,
                local_files_only=True,
            )
        )
        index = folder / INDEX
        shards = JsonObject.read(index).child("weight_map") if index.exists() else None
        wanted = {str(file) for file in shards.values.values()} if shards else set[str]()
        whole = all((folder / file).exists() for file in ("config.json", *wanted))
        if whole and any(folder.glob("*.safetensors")):
            return folder
    return None


def small_copy(name: HubName, files: Sequence[str]) -> Path:
    """The folder of a model with those of `files` that it has, the first of which it must have. The
    hub is not asked if the cache has all of them, and what the cache has counts if it does not
    respond. Raises CheckpointError."""
    here = local_copy(name)
    if here is not None:
        return here
    with explained(name):
        found = [try_to_load_from_cache(name.repo, f, revision=name.revision) for f in files]
    config = Path(found[0]) if isinstance(found[0], str) else None
    if config is not None and all(found):
        return config.parent

    def ask() -> ModelInfo:
        return HfApi().model_info(name.repo, revision=name.revision, timeout=TIMEOUT)

    try:
        asked(name, ask)
    except HubUnreachableError:
        if config is not None:
            return config.parent
        raise
    with explained(name):
        folder = Path(
            snapshot_download(name.repo, revision=name.revision, allow_patterns=list(files))
        )
    if not (folder / files[0]).exists():
        raise CheckpointError(
            f"{name} has no {files[0]}.", hint=f"`outrider pull {name}` fetches a GGUF file"
        )
    return folder


def local_gguf(name: HubName) -> Path | None:
    """The first GGUF file of a model in the cache; None if it is not there or not whole."""
    try:
        store = store_of(name)
    except HFValidationError:
        return None
    commit = name.revision
    with suppress(OSError, ValueError):
        commit = read_text(store / "refs" / name.revision, FileKind.SYSTEM).strip()
    folder = store / "snapshots" / commit
    files = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF}")]
    if not name.tag and any(folder.glob("*.safetensors")):
        return None
    with suppress(CheckpointError):
        return folder / chosen_gguf(name, files)[1][0] if files else None
    return None


def _is_read(file: str) -> bool:
    wanted = any(fnmatch(file, pattern) for pattern in HUB_FILES)
    return wanted and not any(fnmatch(file, pattern) for pattern in HUB_NOISE)


def _check_readable(name: HubName, everything: Iterable[str], files: Iterable[str]) -> None:
    """Raise CheckpointError unless `files` make a model; the message lists the other files."""
    kept = list(files)
    if "config.json" in kept and any(file.endswith(".safetensors") for file in kept):
        return
    every = list(everything)
    pickles = [file for file in every if file.endswith(PICKLES)]
    if pickles:
        there = f"pickle files, such as {pickles[0]}, which can run code when they are read"
        hint = (
            "choose a repository with safetensors, or a revision that has them: the hub's own "
            "conversions are pull requests, so try --revision refs/pr/1. Where you trust them: "
            f"`hf download {name.repo}`, and name its folder as --draft for a way to convert heads"
        )
    else:
        there = ", ".join(every[:5]) or "no files"
        hint = "is it the repository of a whole model? `outrider models pairs` lists some"
    raise CheckpointError(
        f"{name} has no config.json together with safetensors; there are {there}.", hint=hint
    )


# The hub serves larger files by another protocol only, which its own client speaks.
_MAX_BYTES = 50_000_000_000


def check_space(models: Sequence[HubModel]) -> int:
    """Free bytes on the disk of the cache. Raises MachineError if `models` do not fit."""
    folder = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free, wanted = shutil.disk_usage(there).free, sum(model.bytes_to_fetch() for model in models)
    if wanted > free:
        raise MachineError(
            f"{wanted / 1e9:.1f} GB are to be fetched, and {folder} has {free / 1e9:.1f} GB free.",
            hint="free some space (`hf cache ls` lists the cache), or set HF_HOME to a folder on a "
            "larger disk",
        )
    return free


def fetch(model: HubModel, report: Report = lambda _: None) -> Path:
    """Fetch the missing files and return the folder of the model, or its first GGUF file.

    `report` is called with the number of bytes since its last call; the number is negative if some
    must be fetched again. Raises CheckpointError and MachineError; bytes already fetched stay.
    """
    with explained(model.name):
        for file in model.missing():
            if not file.large or file.num_bytes > _MAX_BYTES:
                continue
            if not model.blob(file).exists():
                _fetch_large(model, file, report)
        small = [file for file in model.missing() if not model.blob(file).exists()]
        # By its name, not its commit, so that the cache maps the name to the commit.
        found = snapshot_download(
            model.name.repo,
            revision=model.name.revision,
            allow_patterns=[file.name for file in model.files],
            tqdm_class=hidden_bar(model.name, sum(file.num_bytes for file in small)),
        )
    folder = Path(found)
    _check_whole(model, folder)
    report(sum(file.num_bytes for file in small))
    return model.path(folder)


def fetch_shown(model: HubModel) -> Path:
    """Fetch with the client's own bar, which HF_HUB_DISABLE_PROGRESS_BARS hides."""
    if not model.missing():
        return fetch(model)
    total, title = model.bytes_to_fetch(), f"fetching {model.name}"
    with hub_bar(total=total, desc=title, unit="B", unit_scale=True) as bar:
        return fetch(model, bar.update)


def _check_whole(model: HubModel, folder: Path) -> None:
    """Raise CheckpointError if `folder` is not the model that was looked up: the name may mean
    another commit by now, and the client falls back to the cache if it does not reach the hub."""
    if folder.name != model.commit:
        raise CheckpointError(
            f"{model.name} changed on the hub while it was fetched, from commit "
            f"{model.commit[:12]} to {folder.name[:12]}.",
            hint="repeat the command, which goes on with the newer one",
        )
    absent = [file.name for file in model.files if not (folder / file.name).exists()]
    if absent:
        raise CheckpointError(
            f"{model.name} did not come as a whole: {absent[0]} is missing"
            + (f", and {len(absent) - 1} more." if absent[1:] else "."),
            hint="repeat the command, which fetches what is missing",
        )


def _fetch_large(model: HubModel, file: HubFile, report: Report) -> None:
    store, blob, part = store_of(model.name), model.blob(file), model.part(file)
    part.parent.mkdir(parents=True, exist_ok=True)
    lock = store.parent / ".locks" / store.name / f"{file.blob}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    # The client's own lock: other programs that fetch the same file with it wait for us.
    with WeakFileLock(lock):
        if blob.exists():
            return
        if part.exists() and part.stat().st_size > file.num_bytes:
            # A server sent all of it again, and a client did not notice.
            part.unlink()
        with part.open("ab") as stream:
            bar = ByteBar(model.name, report, file.num_bytes - stream.tell())
            try:
                http_get(
                    hf_hub_url(model.name.repo, file.name, revision=model.commit),
                    stream,
                    resume_size=stream.tell(),
                    headers=build_hf_headers(),
                    expected_size=file.num_bytes,
                    displayed_filename=file.name,
                    _tqdm_bar=cast("Any", bar),
                )
            except CheckpointError:
                # The server sent more than it announced: none of it can be trusted.
                part.unlink()
                raise
        if _sha256(part) != file.blob:
            part.unlink()
            raise CheckpointError(
                f"{file.name} of {model.name} came damaged: its hash is not the hub's.",
                hint="repeat the command, which fetches that file again",
            )
        part.replace(blob)


def _sha256(path: Path) -> str:
    with open_regular(path) as stream:
        digest = hashlib.sha256()
        while piece := stream.read(2**20):
            digest.update(piece)
        return digest.hexdigest()
