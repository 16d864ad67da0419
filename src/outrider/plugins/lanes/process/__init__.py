"""A drafter in a process of its own: messages, shared memory, and the process's life.

Open client.py first: the drafter that the engine sees. worker.py starts and ends the process,
child.py is its program, frames.py and messages.py define the messages, shared.py the memory of
both, options.py the configuration.
"""
