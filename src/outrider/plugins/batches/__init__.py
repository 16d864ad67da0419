"""Files of requests: `outrider batch`, and OpenAI's files and batches of `outrider serve --files`.

lines.py reads and answers lines, run.py runs them through an engine, on_ray.py on a Ray cluster;
verbs.py is the verb. In a server files.py keeps what clients upload, and batches.py runs its lines
as requests.
"""
