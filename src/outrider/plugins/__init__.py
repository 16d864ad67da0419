"""Plugins: mechanisms that a program without them runs as well, each known by a line of the core.

gpu/ has kernels in Triton and captured rounds for CUDA, transformers/ runs decoders of that library
over the paged KV cache, parallel/ shares a model among ranks, lanes/ drafts ahead of verdicts and
in another process, prompt_store/ keeps pages on disk, cluster/ serves and runs batches on Ray,
batches/ answers OpenAI's batches of uploaded files, proof/ has contracts of drafters and rules,
compat/ has classes under the names of other programs, profile.py times kernels, and spans.py sends
traces of requests to OpenTelemetry; heads/ has EAGLE, MTP, Medusa and the drafters after them.
A drafter is found in a folder `drafters`; pyproject.toml lists the imports by which the core
reaches the others.
"""
