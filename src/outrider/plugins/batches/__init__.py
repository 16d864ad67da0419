"""Files and batches of OpenAI's API, for a server that `outrider serve --files FOLDER` starts.

files.py keeps what clients upload, batches.py runs the lines of a file as requests to the server.
"""
