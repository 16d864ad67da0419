"""Names of tensors in GGUF files, and those of the same tensors in checkpoints."""

from __future__ import annotations

LLAMA_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FFN = ("ffn_gate", "ffn_up", "ffn_down")
EXPERT_NAMES = {f"{part}_exps": f"mlp.experts.{part[4:]}_proj" for part in FFN}
# Newer files have gate and up of the experts in one tensor.
EXPERT_NAMES["ffn_gate_up_exps"] = "mlp.experts.gate_up_proj"
ROUTED = {**EXPERT_NAMES, "ffn_gate_inp": "mlp.gate"}
SHARED = {
    **ROUTED,
    **{f"{part}_shexp": f"mlp.shared_expert.{part[4:]}_proj" for part in FFN},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
DEEPSEEK = {
    **ROUTED,
    **{f"{part}_shexp": f"mlp.shared_experts.{part[4:]}_proj" for part in FFN},
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
