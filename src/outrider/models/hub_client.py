"""Names of models on the Hugging Face hub; the errors and the download limits of its client.

A hub may send more than it announced, so a download ends at the announced size.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import tqdm as hub_bar

from outrider.core.errors import CheckpointError, MachineError, OutriderError, words_of

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


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository with a branch, tag or commit."""

    repo: str
    revision: str = constants.DEFAULT_REVISION

    def __str__(self) -> str:
        """The name as loaders accept it: REPO or REPO@REVISION."""
        default = self.revision == constants.DEFAULT_REVISION
        return self.repo if default else f"{self.repo}@{self.revision}"

    @property
    def store(self) -> Path:
        """The repository's folder in the cache, which may not exist yet."""
        folder = repo_folder_name(repo_id=self.repo, repo_type="model")
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
            f"the cache of models, {constants.HF_HUB_CACHE}, cannot be written: {error.strerror}.",
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
