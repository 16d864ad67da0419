"""Python API: text in, text out.

Open llm.py first (`LLM`). callers.py has the prompts of callers and lets threads share one engine,
request.py turns a prompt into a sequence, stream.py and output.py turn tokens into text and events,
result.py has the results of a caller. async_llm.py is the same for asyncio, with a thread that runs
the engine. plan.py, memory.py and loading.py check and load a pair of models. tokenizer.py and
chat_template.py wrap the files of a checkpoint, and helper.py is a process that runs programs of
theirs.
"""
