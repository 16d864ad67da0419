"""Bugs in memory: commits, plans, forks, pages and what may be found by content."""

from __future__ import annotations

from checks.pages import check_pages
from checks.runs import poisoned_rollback, rollback
from checks.state import check_speculation_is_not_found
from mutants.planting import Mutant

PAGED = "outrider.state.paged_kv"
PAGES = "outrider.state.pages"

MUTANTS = (
    Mutant(
        "commit keeps one too few",
        PAGED,
        "[seq.staged[node] for node in path]",
        "[seq.staged[node] for node in path[:-1]]",
        rollback,
    ),
    Mutant("tree copy skipped", PAGED, "        if moved:", "        if not path:", rollback),
    Mutant(
        "tree copy the wrong way round",
        PAGED,
        "self._copy(source, target)",
        "self._copy(target, source)",
        rollback,
    ),
    Mutant("every row counted as copied", PAGED, "return len(moved)", "return len(path)", rollback),
    Mutant(
        "chain sees one key less",
        PAGED,
        "range(positions.start + 1, positions.stop + 1)",
        "range(positions.start, positions.stop)",
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
        "position=base + seen.num_nodes - 1",
        "position=base + node",
        rollback,
    ),
    Mutant(
        "staged nodes forgotten by later steps",
        PAGED,
        "first = len(seq.tokens), seq.num_staged",
        "first = len(seq.tokens), 0",
        rollback,
    ),
    Mutant(
        "page not released",
        PAGED,
        "self._pool.release(self._sequences.pop(seq_id).pages)",
        "self._pool.release(self._sequences.pop(seq_id).pages[1:])",
        rollback,
    ),
    Mutant(
        "fork shares an unfinished page",
        PAGED,
        "            if rest:\n                pages.append(self._pool.take())",
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
        "tokens = old.tokens[:length]",
        "tokens = old.tokens[:]",
        rollback,
    ),
    Mutant(
        "speculated tokens findable",
        PAGED,
        "seq.stage(row.tokens, row.parents)",
        "seq.stage(row.tokens, row.parents); "
        "self._pool.remember(seq.pages, seq.tokens + seq.staged, 0)",
        check_speculation_is_not_found,
    ),
    Mutant(
        "stale prefix without generation",
        PAGES,
        "return page, self._generation[page]",
        "return page, 0",
        check_pages,
    ),
    Mutant(
        "taken page still findable",
        PAGES,
        "        self._forget(page)\n        return page",
        "        self._forget(-1)\n        return page",
        check_pages,
    ),
    Mutant(
        "shared page stays in the ring",
        PAGES,
        "self._free.pop(page, None)",
        "self._free.get(page, None)",
        check_pages,
    ),
    Mutant("pages as a stack", PAGES, "popitem(last=False)", "popitem(last=True)", check_pages),
    Mutant(
        "beginnings die first",
        PAGES,
        "for page in reversed(pages):",
        "for page in list(pages):",
        check_pages,
    ),
    Mutant(
        "prefix by content without place",
        PAGES,
        "parent = self._name(page)",
        "parent = _START",
        check_pages,
    ),
    Mutant(
        "capacity not checked before taking",
        PAGED,
        "self._pool.require(sum(missing.values()))",
        "self._pool.require(0)",
        rollback,
    ),
)
