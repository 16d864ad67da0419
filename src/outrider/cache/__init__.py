"""KV cache: pages, commit and rollback, prefix sharing, compaction.

Open paged_kv.py first: its `commit` keeps the accepted path, and rejected tokens stay as dead
space. pages.py has shared prefixes, the pages of one sequence, and how many tokens fit; pool.py has
free pages, the frames of windowed layers, and the choice of the keys of a prompt that stay.
plugins/hybrids has recurrent states.
"""
