"""Files of a prompt store: a wrong byte is never used, the folder stays bounded and private."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import shutil
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from outrider.cache.pages import PageName, Part
from outrider.core.errors import ConfigError
from outrider.plugins.prompt_store import files
from outrider.plugins.prompt_store.files import (
    DEFAULT_BYTES,
    DamagedError,
    StoreFolder,
    check_file,
    parsed,
)
from outrider.plugins.prompt_store.store import PAUSE_SECONDS, SHARE, Pace, PromptStore

MODEL = hashlib.sha256(b"model").hexdigest()[:32]
ORIGIN = hashlib.sha256(b"origin").hexdigest()


def chain(num_pages: int, first: int = 0) -> list[PageName]:
    """The names of the pages of one text, of two tokens each."""
    names: list[PageName] = []
    for index in range(num_pages):
        names.append(PageName(names[-1] if names else ORIGIN, index, (first, index)))
    return names


def parts_of(number: int, size: int = 24) -> list[Part]:
    """A page of two parts, the second of which is a view with gaps."""
    whole = np.full((2, size, 2), number, np.uint8)
    return [np.arange(size, dtype=np.uint8).reshape(2, -1) + np.uint8(number), whole[:, :, 0]]


def read(store: StoreFolder, name: PageName) -> list[Part]:
    parts = [np.zeros_like(part) for part in parts_of(0)]
    store.read("page", MODEL, name, parts)
    return parts


@pytest.fixture
def store(tmp_path: Path) -> StoreFolder:
    return StoreFolder.opened(str(tmp_path / "prompts"))


def test_what_is_written_is_read_again_byte_for_byte(store: StoreFolder) -> None:
    names = chain(3)
    for number, name in enumerate(names):
        store.write("page", MODEL, name, parts_of(number), used=5)
    for number, name in enumerate(names):
        for found, wanted in zip(read(store, name), parts_of(number), strict=True):
            assert np.array_equal(found, wanted)
        check_file(store.path("page", MODEL, name))
    assert [problem for _, problem in store.verify()] == [""] * 3
    assert {one.used for one in store.files()} == {5}
    assert oct(store.folder.stat().st_mode)[-3:] == "700"


def test_no_byte_may_change(store: StoreFolder) -> None:
    name = chain(1)[0]
    store.write("page", MODEL, name, parts_of(1), used=0)
    path = store.path("page", MODEL, name)
    whole = path.read_bytes()
    changed = [
        *(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(len(whole))),
        *(whole[:length] for length in (0, 1, 12, 64, len(whole) - 1)),
        whole + b"\0",
    ]
    for data in changed:
        path.write_bytes(data)
        with pytest.raises(DamagedError):
            read(store, name)
        with pytest.raises(DamagedError):
            check_file(path)
    path.write_bytes(whole)
    assert np.array_equal(read(store, name)[0], parts_of(1)[0])


def test_a_file_is_used_for_its_own_page_alone(store: StoreFolder) -> None:
    first, second = chain(2)
    other_model = MODEL[::-1]
    store.write("page", MODEL, first, parts_of(1), used=0)
    data = store.path("page", MODEL, first).read_bytes()
    for kind, model, name in (
        ("page", MODEL, second),
        ("page", other_model, first),
        ("state", MODEL, first),
        ("page", MODEL, PageName(ORIGIN, 0, (9, 9), first.digest)),
    ):
        path = store.path(kind, model, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        with pytest.raises(DamagedError, match="another"):
            store.read(kind, model, name, [np.zeros_like(part) for part in parts_of(0)])
    assert sum(bool(problem) for _, problem in store.verify()) == 3
    assert len(list(store.files())) == 1


def test_names_stand_for_model_salt_and_all_tokens(store: StoreFolder) -> None:
    def name(model: str, salt: str, *pages: tuple[int, ...]) -> PageName:
        keeper, found = PromptStore(store, model, Pace(lambda: True)), None
        for tokens in pages:
            found = keeper.name(found, tokens, salt)
        assert found is not None
        return found

    found = [
        name("a", "", (1, 2), (3, 4)),
        name("b", "", (1, 2), (3, 4)),
        name("a", "key", (1, 2), (3, 4)),
        name("a", "", (1, 3), (3, 4)),
        name("a", "", (1, 2), (4, 3)),
        name("a", "", (3, 4)),
    ]
    assert len({one.digest for one in found}) == len(found)
    # These are the names of files that exist: they must not change.
    origin = hashlib.sha256(b"a\n").digest()
    first = hashlib.sha256(origin + struct.pack("<2q", 1, 2)).digest()
    assert found[0].digest == hashlib.sha256(first + struct.pack("<2q", 3, 4)).hexdigest()
    assert name("a", "", (1, 2), (3, 4)).digest == found[0].digest
    assert (found[0].index, found[0].tokens) == (1, (3, 4))
    assert found[0].before == name("a", "", (1, 2)).digest


def test_names_of_long_texts_are_computed_when_they_are_needed() -> None:
    names = chain(5_000)
    last = PageName(names[-1], 5_000, (1,))
    assert not any(name.known for name in names)
    assert last.before == names[-1].digest == chain(5_000)[-1].digest
    assert all(name.known for name in names)
    assert names[-1].previous == names[-2].digest  # no name holds all those before it


def test_the_longest_unused_ends_of_texts_go_first(store: StoreFolder) -> None:
    old, new = chain(8), chain(8, first=1)
    store.most_bytes = 1 << 30
    for names, used in ((old, 1), (new, 2)):
        for name in names:
            store.write("page", MODEL, name, parts_of(0), used=used)
    each = next(store.files()).num_bytes
    store.most_bytes = 16 * each
    assert store.make_space() == 4  # down to three quarters
    left = {(one.used, one.index) for one in store.files()}
    assert left == {(1, i) for i in range(4)} | {(2, i) for i in range(8)}
    for number in range(40):
        store.write("page", MODEL, chain(1, first=9 + number)[0], parts_of(0), used=3 + number)
        assert sum(one.num_bytes for one in store.files()) <= store.most_bytes
    assert all(one.used > 2 for one in store.files())


def test_unfinished_files_of_ended_processes_are_deleted(store: StoreFolder) -> None:
    store.write("page", MODEL, chain(1)[0], parts_of(0), used=0)
    folder = store.path("page", MODEL, chain(1)[0]).parent
    for name, age in ((".a.part", 3600), (".b.part", 0)):
        (folder / name).write_bytes(b"x")
        at = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (at, at))
    store.make_space()
    assert sorted(path.name for path in folder.glob(".*")) == [".b.part"]


@pytest.mark.parametrize(
    ("text", "folder", "most"),
    [
        ("p", "p", DEFAULT_BYTES),
        ("a:b", "a:b", DEFAULT_BYTES),
        ("/p:20GB", "/p", 20 * 10**9),
        ("/p:1.5g", "/p", 1_500_000_000),
        ("p:2000000", "p", 2_000_000),
        ("p:3 MB", "p", 3_000_000),
        ("p:2GiB", "p", 2 << 30),
        ("p:5/q", "p:5/q", DEFAULT_BYTES),
        ("p:5:1G", "p:5", 10**9),
    ],
)
def test_a_folder_may_have_a_size(text: str, folder: str, most: int) -> None:
    assert parsed(text) == (Path(folder), most)


@pytest.mark.parametrize(
    "text", [":5GB", "p:10", "p:1kB", "p:0", "p:-5GB", "p:5XB", "~nobody-here/p"]
)
def test_sizes_that_cannot_work_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="prompt_store"):
        parsed(text)


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^\S+photos holds other files than a prompt store\.\n"):
        StoreFolder.opened(str(tmp_path / "photos"))
    with pytest.raises(ConfigError, match="no prompt store") as caught:
        StoreFolder.opened(str(tmp_path / "none"), create=False)
    assert caught.value.hint == "name one that exists"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a folder"):
        StoreFolder.opened(str(tmp_path / "file"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="prompt_store"):
        StoreFolder.opened(str(tmp_path / "loop"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write"):
        StoreFolder.opened(str(tmp_path / "open"))
    newer = StoreFolder.opened(str(tmp_path / "newer")).folder
    (newer / "prompt-store.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="does not read"):
        StoreFolder.opened(str(newer))


@pytest.mark.parametrize("name", ["new\nline \u2028 \udcff", "-rf", "a:b", "%s{}"])
def test_a_folder_may_have_any_name_and_lie_behind_a_link(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / name)
    store = StoreFolder.opened(str(tmp_path / "link"))
    store.write("page", MODEL, chain(1)[0], parts_of(0), used=0)
    assert store.folder == tmp_path / name
    assert [problem for _, problem in StoreFolder.opened(str(tmp_path / name)).verify()] == [""]


def test_two_processes_may_make_the_same_store(tmp_path: Path) -> None:
    """One sees what the other, which may be killed meanwhile, has written so far."""
    (tmp_path / ".prompt-store.json.abc.part").write_bytes(b"{")
    StoreFolder.opened(str(tmp_path))


def test_a_store_that_is_emptied_meanwhile_is_written_again(store: StoreFolder) -> None:
    keeper = PromptStore(store, MODEL, Pace(lambda: True), {"name": "tiny"})
    copied: Callable[[], list[Part]] = partial(parts_of, 1)

    def emptied() -> list[Part]:
        assert store.clear()[0] == 1
        return parts_of(1)

    first, second, third = chain(3)
    for name, part in ((first, copied), (second, emptied), (third, copied)):
        keeper.offer("page", name, part)
        assert keeper.flush()
    assert not keeper.problem
    assert [keeper.has("page", name) for name in (first, second, third)] == [False, True, True]
    assert (store.folder / MODEL / "model.json").exists()


def test_a_store_that_is_deleted_is_not_made_again(store: StoreFolder) -> None:
    """It would be open to others, and no store."""
    keeper = PromptStore(store, MODEL, Pace(lambda: True))
    shutil.rmtree(store.folder)
    keeper.offer("page", chain(1)[0], partial(parts_of, 1))
    assert keeper.flush()
    assert keeper.problem
    assert not store.folder.exists()


def test_listing_goes_on_while_others_delete(store: StoreFolder) -> None:
    for number in range(3):
        store.write("page", MODEL, chain(1, first=number)[0], parts_of(0), used=0)
    left = store.files()
    next(left)
    shutil.rmtree(store.folder / MODEL)
    assert len(list(left)) < 2
    assert store.clear() == (0, 0)


def test_a_clock_that_was_set_back_keeps_nothing_for_ever(store: StoreFolder) -> None:
    ahead = time.time_ns() + 10**18
    store.write("page", MODEL, chain(1)[0], parts_of(0), used=ahead)
    store.make_space()
    assert next(store.files()).used <= time.time_ns()


def test_a_file_that_cannot_be_read_is_not_deleted(
    store: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, name = PromptStore(store, MODEL, Pace(lambda: True)), chain(1)[0]
    store.write("page", MODEL, name, parts_of(1), used=0)
    parts = [np.zeros_like(part) for part in parts_of(0)]
    with monkeypatch.context() as patched:
        patched.setattr(files, "open_regular", partial(fail, OSError(errno.EMFILE, "too many")))
        assert not keeper.read("page", name, parts)
        assert [problem for _, problem in store.verify()] == ["it cannot be read: too many"]
    assert keeper.read("page", name, parts)


def fail(error: OSError, *_: object, **__: object) -> None:
    raise error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_an_error_of_the_disk_ends_writing_with_one_warning(
    store: StoreFolder,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, lost, later = chain(3)
    keeper = PromptStore(store, MODEL, Pace(lambda: True))
    copied: Callable[[], list[Part]] = partial(parts_of, 1)
    keeper.offer("page", kept, copied)
    assert keeper.flush()
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        error = OSError(number, os.strerror(number))
        patched.setattr(files, "write_private", partial(fail, error))
        keeper.offer("page", lost, copied)
        assert keeper.flush()
        keeper.offer("page", later, copied)
        assert keeper.flush()
    assert keeper.problem == os.strerror(number)
    assert [one.message for one in caplog.records if os.strerror(number) in one.message]
    assert len(caplog.records) == 1
    assert [keeper.has("page", name) for name in (kept, lost, later)] == [True, False, False]
    assert keeper.read("page", kept, [np.zeros_like(part) for part in parts_of(0)])


def test_damaged_files_are_deleted_when_they_are_met(store: StoreFolder) -> None:
    keeper, name = PromptStore(store, MODEL, Pace(lambda: True)), chain(1)[0]
    keeper.offer("page", name, partial(parts_of, 1))
    assert keeper.flush()
    path = store.path("page", MODEL, name)
    path.write_bytes(path.read_bytes()[:-1])
    parts = [np.zeros_like(part) for part in parts_of(0)]
    assert not keeper.read("page", name, parts)
    assert not keeper.has("page", name)
    assert not keeper.read("page", name, parts)
    assert (keeper.counts.damaged, keeper.counts.read) == (1, 0)
    # From now on a file is checked before it counts as written.
    path.write_bytes(b"damaged")
    keeper.offer("page", name, partial(parts_of, 1))
    assert keeper.flush()
    assert keeper.read("page", name, parts)


def test_pages_whose_memory_was_used_again_are_not_written(store: StoreFolder) -> None:
    keeper, (first, name, after) = PromptStore(store, MODEL, Pace(lambda: True)), chain(3)
    keeper.offer("page", first, partial(parts_of, 1))
    keeper.offer("page", name, lambda: None)
    # Nothing behind a page that is missing could be found.
    keeper.offer("page", after, partial(parts_of, 1))
    keeper.offer("state", name, partial(parts_of, 1))
    keeper.offer("state", first, partial(parts_of, 1))
    assert keeper.flush()
    assert [keeper.has("page", one) for one in (first, name, after)] == [True, False, False]
    assert [keeper.has("state", one) for one in (first, name)] == [True, False]
    assert (keeper.counts.missed, keeper.counts.written) == (3, 2)


def test_copies_that_wait_are_bounded(store: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.plugins.prompt_store.store._MOST_COPIED", 500)
    keeper = PromptStore(store, MODEL, Pace(lambda: False, due=math.inf))
    names, num_copied = chain(20), 0

    def copied() -> list[Part]:
        nonlocal num_copied
        num_copied += 1
        return parts_of(1)

    for name in names:
        keeper.offer("page", name, copied, at_once=True)
    each = sum(part.nbytes for part in parts_of(1))
    assert num_copied == math.ceil(500 / each) == 20 - keeper.counts.missed
    assert keeper.flush()
    keeper.offer("page", names[num_copied], copied, at_once=True)
    assert keeper.flush()
    assert keeper.counts.written == num_copied


def test_requests_leave_a_share_of_the_time_to_writing(store: StoreFolder) -> None:
    pace = Pace(lambda: False)
    keeper = PromptStore(store, MODEL, pace)
    began = time.monotonic()
    for name in chain(200):
        keeper.offer("page", name, partial(parts_of, 1))
    while not keeper.counts.written:
        time.sleep(0.01)
    time.sleep(0.3)
    assert keeper.counts.written < 200
    assert pace.due - began >= pace.busy_seconds / SHARE > 0
    assert keeper.flush(60)
    assert keeper.counts.written == 200


def test_a_pause_of_requests_is_used(store: StoreFolder) -> None:
    running = [True]
    pace = Pace(lambda: not running, due=math.inf)
    keeper = PromptStore(store, MODEL, pace)
    for name in chain(50):
        keeper.offer("page", name, partial(parts_of, 1))
    time.sleep(2 * PAUSE_SECONDS)
    running.clear()
    keeper.used(())
    assert not pace.is_pause()
    assert keeper.counts.written == 0
    while keeper.counts.written < 50:
        time.sleep(0.01)
    assert pace.busy_seconds == 0
