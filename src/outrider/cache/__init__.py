"""KV cache: pages, commit and rollback, prefix sharing, recurrent states, compaction.

Open paged_kv.py first: its `commit` keeps the accepted path, and rejected tokens stay as dead
space. pages.py has shared prefixes and the pages of one sequence, pool.py free pages and the frames
of windowed layers; hybrid.py and recurrent.py have the memory of hybrid models; compaction.py
chooses the keys of a prompt that stay; capacity.py computes how many tokens fit.
"""
