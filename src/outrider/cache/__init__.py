"""KV cache: pages, commit and rollback, prefix sharing, recurrent states, compaction.

Open paged_kv.py first: what `commit` keeps, and where rejected tokens stay as dead space. pages.py
has shared prefixes, pool.py free pages, frames.py where layers with a window keep theirs,
sequence_pages.py what one sequence has of them; hybrid.py and recurrent.py the memory of hybrid
models; compaction.py which keys of a prompt stay; capacity.py how many tokens fit.
"""
