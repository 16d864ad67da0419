"""llama.cpp behind JSON lines: one request a line on stdin, one answer a line on stdout.

A process of its own, for the library ends its process at a file that it cannot read. Started as
`python peer.py SOURCE`, where SOURCE is the unpacked archive of llama-cpp-python; the folder of the
built libraries is in LLAMA_CPP_LIB_PATH.
"""

from __future__ import annotations

import ctypes
import json
import sys
import types
from typing import Any

_MAX_TOKENS = 1 << 16


class Peer:
    """One model at a time, or its vocabulary alone."""

    def __init__(self, source: str) -> None:
        package = types.ModuleType("llama_cpp")
        # The package itself imports dependencies that its binding does not need.
        package.__path__ = [f"{source}/llama_cpp"]
        sys.modules["llama_cpp"] = package
        from llama_cpp import llama_cpp  # type: ignore[import-not-found]

        self._lib: Any = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model: Any = None

    def open(self, path: str, vocabulary: bool) -> bool:
        lib = self._lib
        if self._model is not None:
            lib.llama_model_free(self._model)
        params = lib.llama_model_default_params()
        # The next file may be written under the same name.
        params.vocab_only, params.load_mode = vocabulary, lib.LLAMA_LOAD_MODE_NONE
        self._model = lib.llama_model_load_from_file(path.encode(), params)
        self._vocab = None if self._model is None else lib.llama_model_get_vocab(self._model)
        return self._model is not None

    def encode(self, texts: list[str], add: bool, parse: bool) -> list[list[int]]:
        room = (ctypes.c_int32 * _MAX_TOKENS)()
        found: list[list[int]] = []
        for text in texts:
            data = text.encode()
            count = self._lib.llama_tokenize(
                self._vocab, data, len(data), room, _MAX_TOKENS, add, parse
            )
            found.append(list(room[:count]))
        return found

    def pieces(self, ids: list[int]) -> list[str]:
        """The bytes of each token, in hexadecimal."""
        room = ctypes.create_string_buffer(4096)
        found: list[str] = []
        for token in ids:
            count = self._lib.llama_token_to_piece(self._vocab, token, room, 4096, 0, True)
            found.append(room.raw[:count].hex())
        return found

    def logits(self, ids: list[int]) -> list[list[float]]:
        """A row for each token of one text."""
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = max(len(ids) + 8, 64)
        params.n_threads = params.n_threads_batch = 1
        # Keys and values in float32, and no attention that rounds them, as in what is compared.
        params.type_k = params.type_v = 0
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = lib.llama_init_from_model(self._model, params)
        size = lib.llama_vocab_n_tokens(self._vocab)
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        failed = lib.llama_decode(context, batch)
        rows = (
            []
            if failed
            else [
                list(lib.llama_get_logits_ith(context, place)[:size]) for place in range(len(ids))
            ]
        )
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        return rows


def main() -> None:
    peer = Peer(*sys.argv[1:])
    for line in sys.stdin:
        name, *given = json.loads(line)
        print(json.dumps(getattr(peer, name)(*given)), flush=True)


if __name__ == "__main__":
    main()
