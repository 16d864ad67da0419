"""`generate` for scripts written for transformers: same arguments, same shapes back.

    from outrider.transformers_compat import generate
    output_ids = generate("folder", **tokenizer(texts, return_tensors="pt", padding=True))

Arguments mean what they mean to `GenerationMixin.generate`, with the defaults of the checkpoint's
generation_config.json. An argument that cannot be honoured is refused by its name. Models stay
loaded, one for each folder and drafter, until `close_all`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.core.clock import host_ints
from outrider.core.errors import ConfigError, nearest
from outrider.core.fields import shown
from outrider.core.files import FileKind, read_json
from outrider.core.params import SamplingParams

_NEW_TOKENS = 20
# transformers' own defaults, if neither caller nor checkpoint has another.
_DEFAULTS: Mapping[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}
# Arguments whose request is always met here, or changes nothing here.
_IDLE = frozenset(
    {"attention_mask", "cache_implementation", "disable_compile", "return_dict_in_generate"}
    | {"synced_gpus", "tokenizer", "use_cache"}
)
# Values that request nothing; any other one is refused.
_OFF: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("top_h", "penalty_alpha"), (None,)),
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "length_penalty", "encoder_repetition_penalty"), (None, 1)
    ),
    **dict.fromkeys(("typical_p", "guidance_scale"), (None, 1.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (None, 0)),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff"), (None, 0.0)),
    **dict.fromkeys(
        ("early_stopping", "renormalize_logits", "remove_invalid_values"), (None, False)
    ),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions"), (None, False)),
    "output_hidden_states": (None, False),
}
_READ = frozenset(
    {"max_new_tokens", "max_length", "min_new_tokens", "min_length", "max_time", "stop_strings"}
    | {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "sequence_bias"}
    | {"input_ids", "num_return_sequences", "eos_token_id", "pad_token_id", "generation_config"}
    | {"streamer", "assistant_model", "prompt_lookup_num_tokens", "num_assistant_tokens"}
)
_LLMS: dict[tuple[object, ...], LLM] = {}


class Streamer(Protocol):
    """Receiver of the prompt's ids, then of those of each round."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """The result with `return_dict_in_generate`. `sequences` are int64, shape (rows, tokens)."""

    sequences: Tensor


def generate(
    model: str | Path | LLM, inputs: object = None, **generate_kwargs: Any
) -> Tensor | GenerateOutput:
    """Generate texts. Returns prompts and texts: int64, shape (rows, padded prompt + longest text).

    `model` is a folder, a hub id, or an LLM. `inputs` are ids of shape (rows, tokens), padded on
    the left under `attention_mask` as transformers wants them, or the tokenizer's whole output.
    With `num_return_sequences` the rows of a prompt follow one another. Sampling draws from torch's
    generator, so `torch.manual_seed` repeats it, though not with transformers' numbers. Raises
    ConfigError, naming the argument.
    """
    if isinstance(inputs, Mapping):
        generate_kwargs = {**cast("Mapping[str, Any]", inputs), **generate_kwargs}
        inputs = None
    given = _checked(generate_kwargs)
    ids_BP, mask_BP = _prompts(inputs, given)
    llm = model if isinstance(model, LLM) else _loaded(model, given)
    asked = _defaults_of(llm, given) | given
    pad, ends = _special_ids(llm, asked)
    rows = [host_ints(row[kept]) for row, kept in zip(ids_BP, mask_BP, strict=True)]
    known = [one for one in ends if 0 <= one < llm.spec.vocab_size]
    params = [_params(asked, ids_BP.shape[1], known) for _ in rows]
    results = _run(llm, rows, params, asked.get("streamer"))
    texts = [result.token_ids for result in results]
    sequences = _joined(ids_BP.repeat_interleave(params[0].n, 0), texts, pad)
    return GenerateOutput(sequences) if asked.get("return_dict_in_generate") else sequences


def close_all() -> None:
    """Close the models that `generate` loaded."""
    while _LLMS:
        _LLMS.popitem()[1].close()


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    known = _IDLE | _OFF.keys() | _READ
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"generate: unknown argument {name!r}.",
                hint=nearest(name, sorted(known), "transformers' name, please"),
            )
        if name in _OFF and value not in _OFF[name]:
            raise ConfigError(
                f"generate: {name}={shown(value)} has no counterpart here.",
                hint=f"leave {name} out, or use transformers for this call",
            )
    config = given.get("generation_config")
    stated = {} if config is None else dict(config.to_diff_dict())
    stated = {name: value for name, value in stated.items() if name in _READ or name in _OFF}
    return _checked(stated) | dict(given) if stated else dict(given)


def _prompts(inputs: object, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids and the mask of those that count, both of shape (rows, tokens)."""
    found = given.get("input_ids") if inputs is None else inputs
    try:
        ids_BP = torch.as_tensor(found).cpu() if found is not None else torch.zeros(0)
    except (TypeError, ValueError, RuntimeError):  # texts, and rows of several lengths
        ids_BP = torch.zeros(0)
    if ids_BP.ndim != 2 or not ids_BP.numel() or ids_BP.is_floating_point():
        raise ConfigError(
            "generate: inputs must be token ids of shape (rows, tokens).",
            hint='tokenizer(texts, return_tensors="pt", padding=True)',
        )
    mask = given.get("attention_mask")
    mask_BP = torch.ones_like(ids_BP) if mask is None else torch.as_tensor(mask).cpu()
    if mask_BP.shape != ids_BP.shape or not bool(mask_BP[:, -1].all()):
        raise ConfigError(
            "generate: attention_mask must have the shape of the ids and end in ones.",
            hint='pad on the left: tokenizer.padding_side = "left"',
        )
    return ids_BP.long(), mask_BP.bool()


def _loaded(model: str | Path, given: Mapping[str, Any]) -> LLM:
    if not isinstance(cast("object", model), str | Path):
        raise ConfigError(
            f"generate: {type(model).__name__} is not a folder or an LLM.",
            hint="model.save_pretrained(folder), and give the folder",
        )
    lookup, draft = given.get("prompt_lookup_num_tokens"), given.get("assistant_model")
    if draft is not None and not isinstance(draft, str | Path):
        raise ConfigError("generate: assistant_model must be a folder.", hint="give its folder")
    k = lookup or given.get("num_assistant_tokens") or 4
    key = (str(model), lookup, str(draft), k)
    if key not in _LLMS:
        drafter = "ngram" if lookup else "auto"
        _LLMS[key] = LLM(model, draft=draft, drafter=drafter, k=k)
    return _LLMS[key]


def _defaults_of(llm: LLM, given: Mapping[str, Any]) -> dict[str, Any]:
    path = llm.folder / "generation_config.json"
    read = read_json(path, FileKind.CONFIG) if path.is_file() else None
    stated = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
    found = {name: stated[name] for name in _READ & stated.keys() if stated[name] is not None}
    if given.get("max_new_tokens") is None and given.get("max_length") is not None:
        found.pop("max_new_tokens", None)
    return {**_DEFAULTS, **found}


def _special_ids(llm: LLM, asked: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """The padding id, and the ids that end a text."""
    stated = asked.get("eos_token_id")
    if stated is None:
        ends = tuple(sorted(llm.stop_ids))
    else:
        ends = (stated,) if isinstance(stated, int) else tuple(int(one) for one in stated)
    pad = asked.get("pad_token_id")
    return (pad if pad is not None else next(iter(ends), 0)), ends


def _params(asked: Mapping[str, Any], num_prompt: int, ends: Sequence[int]) -> SamplingParams:
    most = asked.get("max_new_tokens")
    if most is None and asked.get("max_length") is None:
        most = _NEW_TOKENS
    elif most is None:
        most = asked["max_length"] - num_prompt
        if most < 1:
            raise ConfigError(
                f"generate: max_length {asked['max_length']} allows no token after the prompt "
                f"of {num_prompt} tokens.",
                hint="set max_new_tokens",
            )
    least = asked.get("min_new_tokens")
    if least is None:
        least = max(0, (asked.get("min_length") or 0) - num_prompt)
    options: dict[str, Any] = {"max_tokens": most, "min_tokens": min(least, most)}
    if asked["do_sample"]:
        options |= {name: asked[name] for name in ("temperature", "top_k", "top_p")}
        options |= {"min_p": asked.get("min_p") or 0.0}
        options |= {"seed": int(torch.randint(2**31, (1,)))}
    return SamplingParams(
        repetition_penalty=asked["repetition_penalty"],
        n=asked.get("num_return_sequences") or 1,
        stop=asked.get("stop_strings") or (),
        stop_token_ids=ends,
        ignore_eos=True,
        max_time=asked.get("max_time") or 0.0,
        logit_bias=_bias(asked.get("sequence_bias")),
        **options,
    )


def _bias(stated: object) -> dict[int, float] | None:
    if stated is None:
        return None
    given = cast("Any", stated)
    pairs: Iterable[tuple[Sequence[int], float]]
    pairs = given.items() if hasattr(given, "items") else given
    found: dict[int, float] = {}
    for ids, bias in pairs:
        if len(ids) != 1:
            raise ConfigError(
                "generate: sequence_bias of several tokens has no counterpart here.",
                hint="bias single tokens",
            )
        found[int(ids[0])] = float(bias)
    return found


def _run(
    llm: LLM,
    rows: Sequence[list[int]],
    params: Sequence[SamplingParams],
    streamer: Streamer | None,
) -> list[GenerationResult]:
    if streamer is None:
        results = llm.generate(rows, params)
        failed = next((result.error for result in results if result.error), None)
        if failed is not None:
            raise ConfigError(f"generate: {failed}")
        return results
    if len(rows) > 1 or params[0].n > 1:
        raise ConfigError("generate: a streamer follows one row.", hint="give one prompt")
    streamer.put(torch.tensor([rows[0]]))
    stream = llm.stream(rows[0], params[0])
    for event in stream:
        if event.token_ids:
            streamer.put(torch.tensor(event.token_ids))
    streamer.end()
    return [stream.result()]


def _joined(prompts_RP: Tensor, texts: Sequence[Sequence[int]], pad: int) -> Tensor:
    longest = max(map(len, texts))
    texts_RT = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts])
    return torch.cat([prompts_RP, texts_RT.long()], 1)
