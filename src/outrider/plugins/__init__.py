"""Plugins: mechanisms that a program without them runs as well (docs/adr/0021-what-the-core-is.md).

apis          Responses of OpenAI and Messages of Anthropic
batches       files of requests: `outrider batch`, and OpenAI's files and batches
cluster       a server on Ray
compat        classes and functions under the names of other programs
doctor        what this machine can run
families      rows of families beyond Llama's and Gemma's kind
gpu           kernels in Triton, and captured rounds for CUDA
gemma4        Gemma 4 and its assistants
heads         EAGLE, MTP, Medusa and the drafters after them
hybrids       models with recurrent states
lanes         schedules of several lanes, drafting ahead of verdicts, drafters in another process
measure       the speed-up and the profile of a run, and times of kernels
parallel      a model that ranks share
proof         contracts of drafters and rules
prompt_store  pages of prompts on disk
published     quantised folders of Hugging Face
running       servers that run: `ps`, `stop`, `top`, and an HTTP client
tools         calls of tools and reasoning in texts of models, and their grammars
transformers  decoders of that library over the paged KV cache
compaction.py prompts that keep a part of their keys
controllers.py  draft lengths by a latency target or a band of acceptance
metrics.py    counts for Prometheus and the dashboard, and audits of a share of the requests
replicas.py   several engines of one model in child processes
several_models.py  models that one server loads in turn
spans.py      traces of requests, sent to OpenTelemetry

A drafter is found in a folder `drafters`, a family in a module `families`, its GGUF files in a
module `architectures`; pyproject.toml lists the imports by which the core reaches the others.
"""
