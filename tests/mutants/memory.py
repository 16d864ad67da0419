"""Bugs in memory: commits, plans, forks, pages and what may be found by content."""

from __future__ import annotations

from checks.memory import check_frames, check_freed, check_pages
from checks.runs import poisoned_rollback, rollback
from checks.state import check_speculation_is_not_found
from mutants.planting import Mutant

PAGED = "outrider.cache.paged_kv"
COLUMNS = "outrider.cache.pages"
PAGES = "outrider.cache.pages"
POOL = "outrider.cache.pool"
FRAMES = "outrider.cache.pool"

MUTANTS = (
    Mutant(
        "commit keeps one too few",
        PAGED,
        "[seq.staged[node] for node in path]",
        "[seq.staged[node] for node in path[:-1]]",
        rollback,
    ),
    Mutant(
        "a page is given back while its last key is seen",
        PAGED,
        "max(length + 1 - self._window, 0)",
        "max(length + 2 - self._window, 0)",
        check_freed,
    ),
    Mutant(
        "a frame is given back too early",
        PAGED,
        "max(length + 1 - self._window, 0)",
        "max(length + 2 - self._window, 0)",
        check_frames,
    ),
    Mutant(
        "a text begins with pages whose frames are gone",
        PAGED,
        "            if missing is None:\n                break",
        "            if missing != -1:\n                break",
        check_frames,
    ),
    Mutant(
        "a text that ends keeps its frames",
        PAGED,
        "self.frames.let_go(seq.in_window)",
        "self.frames.let_go(())",
        check_frames,
    ),
    Mutant(
        "a page that is taken again keeps two frames",
        FRAMES,
        "if old is not None:",
        "if old == -1:",
        check_frames,
    ),
    Mutant(
        "kept branches move where all is seen alone",
        FRAMES,
        "self.slots(into_C), rows)",
        "self.slots(origin_C), rows)",
        check_frames,
    ),
    Mutant(
        "kernels are told of no frame",
        FRAMES,
        "self.of_P[page] = frame",
        "self.of_P[page] = 0",
        check_frames,
    ),
    Mutant(
        "a text offers pages whose beginning it gave back",
        PAGED,
        "if self.frames is not None or not 0 < index <= seq.num_freed:",
        "if True:",
        check_freed,
    ),
    Mutant("tree copy skipped", PAGED, "        if moved:", "        if not path:", rollback),
    Mutant(
        "tree copy the wrong way round",
        PAGED,
        "self._moved(source, target)",
        "self._moved(target, source)",
        rollback,
    ),
    Mutant(
        "every row counted as copied",
        PAGED,
        "self._free_unseen(seq)\n        return len(moved)",
        "self._free_unseen(seq)\n        return len(path)",
        rollback,
    ),
    Mutant(
        "chain sees one key less",
        COLUMNS,
        "range(rows.start + 1, rows.stop + 1)",
        "range(rows.start, rows.stop)",
        poisoned_rollback,
    ),
    Mutant(
        "branch sees a sibling",
        PAGED,
        "visible=base + seen.run,",
        "visible=base + seen.run + 1,",
        rollback,
    ),
    Mutant(
        "branch misses its own key",
        PAGED,
        "extra=seen.extra",
        "extra=seen.extra[:-1]",
        rollback,
    ),
    Mutant(
        "branch counts nodes for places",
        PAGED,
        "position = base + seen.num_nodes - 1 + dropped",
        "position = base + node + dropped",
        rollback,
    ),
    Mutant(
        "staged nodes forgotten by later steps",
        PAGED,
        "= seq.num_rows, seq.num_staged, seq.num_dropped",
        "= seq.num_rows, 0, seq.num_dropped",
        rollback,
    ),
    Mutant(
        "page not released",
        PAGED,
        "self._pool.release(self._held(seq))",
        "self._pool.release(self._held(seq)[1:])",
        rollback,
    ),
    Mutant(
        "fork shares an unfinished page",
        PAGED,
        "            if rest:\n                pages.append(self._take(pages, GROWTH))",
        "            if rest:\n                pages.append(old.pages[whole])",
        rollback,
    ),
    Mutant(
        "fork copies nothing",
        PAGED,
        "        if rest:\n            start",
        "        if rest > 99:\n            start",
        rollback,
    ),
    Mutant(
        "fork of a beginning takes all",
        PAGED,
        "num_dropped = old.tokens[:length], old.num_dropped",
        "num_dropped = old.tokens[:], old.num_dropped",
        rollback,
    ),
    Mutant(
        "speculated tokens findable",
        PAGED,
        "seq.stage(row.tokens, row.parents)",
        "seq.stage(row.tokens, row.parents); "
        "self._pool.remember(seq.pages, seq.tokens + seq.staged, 0, seq.salt)",
        check_speculation_is_not_found,
    ),
    Mutant(
        "stale prefix without generation",
        PAGES,
        "self._name_of[page] = next(self._fillings)",
        "self._name_of[page] = page",
        check_pages,
    ),
    Mutant(
        "taken page still findable",
        POOL,
        "        self._forget(page)\n        return page",
        "        self._forget(-1)\n        return page",
        check_pages,
    ),
    Mutant(
        "shared page stays in the ring",
        POOL,
        "self._ring.pop(page, None)",
        "self._ring.get(page, None)",
        check_pages,
    ),
    Mutant(
        "shared page stays open",
        POOL,
        "        if page in self._open:\n            self._open.remove(page)",
        "        if page in self._ring:\n            self._open.remove(page)",
        check_pages,
    ),
    Mutant(
        "young content is opened",
        POOL,
        "and len(self._open) < len(self._ring)",
        "and self._ring",
        check_pages,
    ),
    Mutant("pages in no row", POOL, "if pages and pages[-1] + 1", "if pages and -1", check_pages),
    Mutant(
        "a text begins in another's way",
        POOL,
        "run[len(run) // 2 :] if is_behind_others else run",
        "run",
        check_pages,
    ),
    Mutant(
        "twins have names of their own",
        PAGES,
        "self._name_of[page] = self._name_of[known]",
        "self._name_of[page] = page",
        check_pages,
    ),
    Mutant("a poorer twin stays", PAGES, "if whole(known):", "if known >= 0:", check_frames),
    Mutant("pages as a stack", POOL, "popitem(last=False)", "popitem(last=True)", check_pages),
    Mutant(
        "beginnings die first",
        POOL,
        "for page in reversed(pages):",
        "for page in list(pages):",
        check_pages,
    ),
    Mutant(
        "prefix by content without place",
        PAGES,
        "parent = self._name_of[page]",
        "parent = salt",
        check_pages,
    ),
    Mutant(
        "capacity not checked before taking",
        PAGED,
        "self._require(sum(missing.values()))",
        "self._require(0)",
        rollback,
    ),
)
