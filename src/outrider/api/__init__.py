"""Python API: text in, text out.

Open llm.py first (`LLM`). request.py makes a sequence of a prompt, stream.py and output.py turn
tokens into text and events, result.py is what a caller gets, turns.py lets threads share one
engine. async_llm.py is the same for asyncio, over the thread of engine_thread.py. batch_lines.py,
batch_files.py and batch_run.py answer files of requests. plan.py, memory.py and loading.py check
and load a pair of models. tokenizer.py and chat_template.py wrap what came with a checkpoint.
wrapper.py is one model with an explicit cache, autoregressive.py plain decoding by itself.
"""
