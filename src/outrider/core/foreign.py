"""Names of our settings in other speculative-decoding projects, for hints and the settings page.

In files, variables and Python, a name of another project is never accepted: two names for one
setting are two sources of a mistake. It is recognised, and the error gives the name used
here. On the command line, flags that take the very same values are read, with a note
(cli/guesses.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from outrider.core.env import PREFIX

VARIABLES_OF_OTHERS = ("SPECDEC_", "SHARPI_")


@dataclass(frozen=True, slots=True)
class Foreign:
    """`name` is spelled as a variable, a flag or a key is; `here` is our setting, or "" if there is
    none, for the reason in `note`."""

    name: str
    here: str
    note: str = ""

    @property
    def spelled(self) -> str:
        """`here` in the form of `name`; "" if there is none."""
        if not self.here:
            return ""
        if self.name.startswith("-"):
            return self.spelled_flag
        return PREFIX + self.here.upper() if self.name.isupper() else self.here

    @property
    def spelled_flag(self) -> str:
        return "--" + self.here.replace("_", "-")

    @property
    def hint(self) -> str:
        note = f": {self.note}" if self.note else ""
        if self.spelled:
            return f"did you mean {self.spelled!r}? {self.name} is another project's name{note}."
        return f"{self.name} is another project's name and has no counterpart here{note}."


def _all(here: str, names: str, note: str = "") -> list[Foreign]:
    return [Foreign(name, here, note) for name in names.split()]


_RAGGED = "batches are ragged, so none need grouping"
_READS = "the host reads one result a round"

FOREIGN: tuple[Foreign, ...] = (
    *_all("dtype", "SPECDEC_DTYPE", "the same values, and auto"),
    *_all("dtype", "SPECDEC_AMP", "one precision for the whole model, no autocast"),
    *_all("deterministic", "SPECDEC_DETERMINISTIC", "seeds belong to requests, in OUTRIDER_SEED"),
    *_all("batch_size", "SPECDEC_BATCH_SIZE"),
    *_all("profile", "SPECDEC_PROFILE"),
    *_all("profile", "SPECDEC_DETAILED_METRICS", "summaries are always in the result"),
    *_all("force_reference", "SPECDEC_FORCE_PYTORCH_BACKEND SPECDEC_FORCE_PY"),
    *_all("debug", "SPECDEC_DEBUG"),
    *_all("log_level", "SPECDEC_DEBUG_PRINTS", "debug"),
    *_all("fused_round", "SPECDEC_CUDA_GRAPH", "whole rounds are captured on CUDA"),
    *_all("lane_streams", "SPECDEC_PARALLEL_STREAMS", "0 becomes 1: lanes share a stream"),
    *_all("lane_sync", "SPECDEC_SYNC_MODE", "the same values, event and barrier"),
    *_all("", "SPECDEC_DRY_RUN", "outrider config and outrider doctor show what would run"),
    *_all("", "SPECDEC_ENABLE_KV_APPEND", "keys and values are always appended in place"),
    *_all("", "SPECDEC_ENABLE_SEQUENCE_POOL", _RAGGED),
    *_all("", "SPECDEC_MIN_GROUP_SIZE SPECDEC_MAX_GROUP_SIZE", _RAGGED),
    *_all("", "SPECDEC_PERIODIC_CACHE_CLEAR", "memory is allocated once"),
    *_all("", "SPECDEC_SYNC_KERNELS SPECDEC_PERIODIC_SYNC", _READS),
    *_all("", "SPECDEC_DEBUG_KV_VERIFY SPECDEC_DEBUG_BATCH_INPUT", "tests look at that"),
    *_all("batched_verify", "SHARPI_SPEC_BATCH_VERIFY", "0 feeds drafts token by token"),
    *_all("batched_verify", "SHARPI_DISABLE_BATCH_VERIFY", "the opposite sense, 1 becomes 0"),
    *_all("drafter", "SHARPI_DISABLE_MTP", "1 becomes none, or another drafter"),
    *_all("k", "SHARPI_MTP_DRAFT_N", "with OUTRIDER_DRAFTER=mtp"),
    *_all("profile", "SHARPI_TRACE_MTP", "a trace of every round"),
    *_all("state_history", "SHARPI_MTP_BATCH_MAX", "one less: drafts a hybrid can return to"),
    *_all("", "SHARPI_BATCH_DECODE_MMQ", "outrider doctor shows which kernels this machine has"),
    *_all("device", "SHARPI_CPU_GDN", "cpu: a hybrid's recurrence runs where its model does"),
    *_all("target", "--base-model --verifier-model --target-model -hf --hf-repo"),
    *_all(
        "draft",
        "--draft-model --assistant-model --model-draft -md --hf-repo-draft -hfd "
        "--speculative-model",
        "without one, --drafter none",
    ),
    *_all("drafter", "--draft-lookup", "ngram"),
    *_all("drafter", "--spec-type --draft-mode", "model, ngram, mtp, eagle, medusa, none or auto"),
    *_all(
        "k",
        "--spec-draft-n-max --draft-max --num-speculative-tokens --gamma --num-draft-tokens "
        "--num-assistant-tokens",
    ),
    *_all("k", "--prompt-lookup-num-tokens", "with --drafter ngram"),
    *_all("draft", "--speculative-config", "with --k; both are flags of their own"),
    *_all("min_k", "--spec-draft-n-min --draft-min --min-draft", "with --controller band or slo"),
    *_all("k", "--max-draft", "the most that a controller chooses"),
    *_all("least_confidence", "--spec-draft-p-min --draft-p-min", "with --drafter block alone"),
    *_all("sampler", "--policy", "token for longest_prefix; threshold, top_k, typical are lossy"),
    *_all("leniency", "--tau", "with --sampler threshold"),
    *_all("controller", "--adaptive-K --adaptive-k", "band"),
    *_all("max_tokens", "--max-new-tokens --n-predict -n --predict"),
    *_all("temperature", "--temp"),
    *_all("threads", "-t --num-threads"),
    *_all("repetition_penalty", "--repeat-penalty"),
    *_all("seed", "-s"),
    *_all("stop", "-r --reverse-prompt --stop-strings"),
    *_all("quantise", "--quantization --quantize", "int8 or int4"),
    *_all("quantise", "--load-in-8bit", "int8"),
    *_all("kv_dtype", "--kv-cache-dtype --cache-type-k --cache-type-v -ctk -ctv", "int8 or auto"),
    *_all("quantise", "--load-in-4bit", "int4"),
    *_all("batch_size", "--max-num-seqs -np --parallel"),
    *_all("tensor_parallel", "--tensor-parallel-size -tp"),
    *_all("arena_tokens", "--gpu-memory-utilization", "counted in tokens"),
    *_all("device", "-ngl --n-gpu-layers --gpu-layers", "cuda has all layers, cpu none"),
    *_all("", "--num-beams", "texts are sampled, or greedy"),
    *_all("", "-f --file", "a prompt is read from stdin: `outrider generate - < FILE`"),
    *_all("", "--format", "`outrider generate PROMPT --json-object`, or --schema"),
    *_all("", "-i --interactive -cnv --conversation", "`outrider chat`"),
    *_all("", "--port --host --api-key", "`outrider serve MODEL` has it"),
    *_all("temperature", "--do-sample", "0 is greedy, anything else samples"),
    *_all("fused_round", "--cuda-graph"),
    *_all("profile", "--metrics-detailed"),
    *_all(
        "",
        "--impl",
        "the scripted model is a class for tests, outrider.plugins.proof.scripted.ScriptedLM",
    ),
    *_all("", "--test-mode", "recipes/test.yaml, with --config, is a run of seconds"),
    *_all("context", "-c --ctx-size --max-model-len --context-length --max-kv-size"),
    *_all("target", "base_model target_model verifier_model"),
    *_all("draft", "draft_model assistant_model"),
    *_all("drafter", "draft_mode", "vanilla is model; eagle and medusa are themselves, of heads"),
    *_all("k", "max_draft num_assistant_tokens gamma speculate_k num_speculative_tokens"),
    *_all("k", "lookahead", "less one where the certain token is counted"),
    *_all("k", "prompt_lookup_num_tokens", "with drafter ngram"),
    *_all("max_tokens", "max_new_tokens num_predict --num-predict max_length"),
    *_all("n", "num_return_sequences best_of"),
    *_all("threads", "n_threads num_thread"),
    *_all("repetition_penalty", "repeat_penalty"),
    *_all("dtype", "torch_dtype", "the same values as words, as in dtype='bfloat16'"),
    *_all("quantise", "load_in_8bit load_in_4bit quantization quantization_config", "int8 or int4"),
    *_all("device", "device_map n_gpu_layers num_gpu", "cuda has all layers, cpu none"),
    *_all("drafter", "enable_speculative_decoding", "none is off"),
    *_all("ignore_eos", "eos_token_id", "ends are the checkpoint's own, and texts of stop"),
    *_all("schema", "response_format guided_json json_schema structured_outputs", "json, any JSON"),
    *_all("regex", "guided_regex"),
    *_all("choices", "guided_choice"),
    *_all("grammar", "guided_grammar guided_decoding"),
    *_all("stop", "stop_token_ids stop_strings stopping_criteria", "texts, as in stop=['END']"),
    *_all("", "num_beams use_beam_search length_penalty", "texts are sampled, or greedy"),
    *_all("", "enable_prefix_caching", "shared beginnings of prompts are always kept"),
    *_all("", "enforce_eager swap_space use_mmap use_mlock", "memory is planned when loading"),
    *_all("", "streaming stream", "llm.stream(prompt) gives a text as it comes"),
    *_all("", "echo", "prompt_logprobs scores the prompt, and the caller has its text"),
    *_all("temperature", "do_sample", "0 is greedy, anything else samples"),
    *_all("arena_tokens", "max_memory_mb", "counted in tokens"),
    *_all("memory_share", "gpu_memory_utilization", "what is not needed is not taken"),
    *_all("context", "max_model_len n_ctx num_ctx max_seq_len max_seq_length"),
    *_all("max_waiting", "max_queue_size"),
    *_all("verify_batch", "verify_micro_batch_size"),
    *_all("decode_batch", "decode_batch_size"),
    *_all("prefill_batch", "prefill_batch_size"),
    *_all("lane_streams", "num_streams"),
    *_all("fused_round", "enable_cuda_graphs"),
    *_all("dtype", "target_dtype draft_dtype", "one for both models"),
    *_all("", "implementation", "the scripted model is a class for tests, not a setting"),
    *_all("", "replicas data_parallel_size", "outrider.server.pool.EnginePool"),
    *_all("", "trust_remote_code", "no checkpoint's code is ever run"),
    *_all("", "hf_token", "HF_TOKEN in the environment, or hf auth login"),
)

_BY_NAME = {item.name: item for item in FOREIGN}


def hint_for(name: str) -> str | None:
    """A hint with our name for a name of another project; None if no project has that name."""
    key = name.removeprefix(PREFIX).lower()
    item = _BY_NAME.get(name) or _BY_NAME.get(key)
    key = key.lstrip("-").replace("-", "_")
    for known in (key, "--" + key.replace("_", "-")):
        if item is None and known in _BY_NAME:
            item = replace(_BY_NAME[known], name=name)
    return item.hint if item else None


def notes_on(variables: Iterable[str]) -> list[str]:
    """A sentence for each variable of the environment that other projects read and we do not."""
    found = [(name, hint_for(name)) for name in sorted(variables)]
    return [
        f"{name} is set, which is not read here; {hint or '`outrider config` lists what is.'}"
        for name, hint in found
        if name.startswith(VARIABLES_OF_OTHERS)
    ]
