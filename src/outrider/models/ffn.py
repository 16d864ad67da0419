"""FFNs: the functions between their products, and mixtures of experts.

xIELU (Huang and Schlag, "Deriving Activation Functions Using Integration", 2024) is

    alpha_p x^2 + beta x                                   for x > 0
    alpha_n (exp(min(x, eps)) - 1 - x) + beta x            otherwise

where files hold the alphas before a softplus, and alpha_n without beta.

In a mixture each token goes through the few experts that a router chooses for it. A pass reads the
weights of the chosen experts only, each once. A token's bits depend on that token alone: the
outputs of its experts are summed in the order of the experts' numbers.

Shapes:  N = tokens, Q = experts of a token, P = N times Q choices by expert, D = hidden size,
         F = an FFN's size, X = experts, I = inputs, O = outputs of a first product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.clock import host_rows
from outrider.kernels.native.layers import DenseWeights, MixtureWeights
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedLinear
from outrider.kernels.reference.delta import by_row
from outrider.models.expert_kinds import ExpertNames, Experts
from outrider.models.layer_kinds import Gate, LayerTraits
from outrider.models.weights import WeightReader

# beta and eps of files that do not have them.
_USUAL = {"beta": 0.5, "eps": -1e-6}


def gated(
    kernels: Kernels, gate: Gate, up_NO: Tensor, out_NF: Tensor, curve: Sequence[float] = ()
) -> None:
    """Compute the input of a dense FFN's second product from the output of its first. `curve` has
    the numbers of xIELU."""
    if gate is Gate.SQUARED:
        out_NF.copy_(torch.relu(up_NO)).square_()
    elif gate is Gate.ERF:
        out_NF.copy_(by_row(functional.gelu, up_NO))
    elif gate is Gate.XIELU:
        out_NF.copy_(by_row(lambda row_F: _xielu(row_F, curve), up_NO))
    else:
        ops = {Gate.GELU: kernels.gelu_mul, Gate.NONE: kernels.gelu}
        ops.get(gate, kernels.silu_mul)(up_NO, out_NF)


def _xielu(row_F: Tensor, curve: Sequence[float]) -> Tensor:
    rise, fall, beta, eps = curve
    below_F = (torch.expm1(row_F.clamp(max=eps)) - row_F) * fall
    return torch.where(row_F > 0, rise * row_F * row_F, below_F) + beta * row_F


def read_curve(
    reader: WeightReader, traits: LayerTraits, prefix: str, index: int
) -> tuple[float, ...]:
    """The numbers of xIELU in layer `index`, whose names begin with `prefix`."""
    if traits.curves:
        alpha_p, alpha_n, beta, eps = traits.curves[index]
    else:
        name = f"{prefix}mlp.act_fn."
        alpha_p, alpha_n = (float(reader.vector(f"{name}alpha_{side}", 1)) for side in "pn")
        beta, eps = (
            float(reader.vector(f"{name}{one}")) if f"{name}{one}" in reader else usual
            for one, usual in _USUAL.items()
        )
    alphas = functional.softplus(torch.tensor([alpha_p, alpha_n]))
    rise, fall = (float(alpha) for alpha in alphas)
    return rise, beta + fall, beta, eps


def feed(kernels: Kernels, sizes: Experts, net: DenseWeights, x_ND: Tensor) -> Tensor:
    """The output of one net for all rows of `x_ND`, in new memory."""
    whole = [(net, slice(None))]
    return _second(kernels, whole, _first(kernels, sizes, whole, x_ND), x_ND.shape[1])


# Nets, each with the rows that go through it.
_Parts = Sequence[tuple[DenseWeights, slice]]


def _first(kernels: Kernels, sizes: Experts, parts: _Parts, x_ND: Tensor) -> Tensor:
    """The inputs of the nets' second products."""
    num_up = parts[0][0].gate_up.num_out
    up_N2F = x_ND.new_empty(x_ND.shape[0], num_up)
    for net, rows in parts:
        _multiply(kernels, net.gate_up, net.gate_up_bias_2F, x_ND[rows], up_N2F[rows])
    activated_NF = x_ND.new_empty(x_ND.shape[0], num_up // sizes.gate.num_up)
    if sizes.gate is Gate.CLAMPED:
        _clamped(sizes, up_N2F, activated_NF)
    else:
        gated(kernels, sizes.gate, up_N2F, activated_NF)
    return activated_NF


def _second(kernels: Kernels, parts: _Parts, activated_NF: Tensor, hidden_size: int) -> Tensor:
    out_ND = activated_NF.new_empty(activated_NF.shape[0], hidden_size)
    for net, rows in parts:
        _multiply(kernels, net.down, net.down_bias_D, activated_NF[rows], out_ND[rows])
    return out_ND


def _multiply(
    kernels: Kernels, packed: PackedLinear, bias_O: Tensor | None, x_NI: Tensor, out_NO: Tensor
) -> None:
    kernels.linear(x_NI, packed, out_NO)
    if bias_O is not None:
        out_NO.add_(bias_O)


def _clamped(sizes: Experts, up_N2F: Tensor, out_NF: Tensor) -> None:
    gate_NF, up_NF = up_N2F.chunk(2, dim=1)
    gate_NF = gate_NF.clamp(max=sizes.limit)
    torch.mul(gate_NF, by_row(torch.sigmoid, gate_NF * sizes.alpha), out=out_NF)
    out_NF.mul_(up_NF.clamp(-sizes.limit, sizes.limit).add_(1))


def _softmax(row_X: Tensor) -> Tensor:
    return torch.softmax(row_X, 0)


def mix(
    kernels: Kernels,
    sizes: Experts,
    weights: MixtureWeights,
    x_ND: Tensor,
    *,
    routed_ND: Tensor | None = None,
) -> Tensor:
    """The output of the mixture for the normed residual `x_ND`. The router reads the same rows, or
    `routed_ND`. A host sync: reads the choices."""
    if weights.native is not None:
        out_ND = torch.empty_like(x_ND)
        kernels.mix(weights.native, x_ND, out_ND)
        return out_ND
    scores_NO = x_ND.new_empty(x_ND.shape[0], weights.router.num_out)
    reads_ND = x_ND if routed_ND is None else routed_ND
    _multiply(kernels, weights.router, weights.router_bias_X, reads_ND, scores_NO)
    share = torch.sigmoid if sizes.has_sigmoids else _softmax
    probs_NX = by_row(share, scores_NO[:, : sizes.num_experts])
    parts_NQ, chosen_NQ = probs_NX.topk(sizes.num_chosen)
    if weights.choice_bias_X is not None or sizes.top_groups < sizes.num_groups:
        ranks_NX = probs_NX if weights.choice_bias_X is None else probs_NX + weights.choice_bias_X
        chosen_NQ = _in_best_groups(sizes, ranks_NX).topk(sizes.num_chosen).indices
        parts_NQ = probs_NX.gather(1, chosen_NQ)
    if sizes.normalise:
        parts_NQ = by_row(lambda row_Q: row_Q / row_Q.sum(), parts_NQ)
    if sizes.scale != 1:
        parts_NQ = parts_NQ * sizes.scale
    if weights.expert_scale_X is not None:
        parts_NQ = parts_NQ * weights.expert_scale_X[chosen_NQ]
    experts, order = by_expert(host_rows(chosen_NQ))
    choices_P = torch.tensor(order, device=x_ND.device)
    rows_P = choices_P // sizes.num_chosen
    nets = [(weights.experts[expert], rows) for expert, rows in experts]
    read_NI = _projected(kernels, weights.latent_in, x_ND)
    activated_PF = _first(kernels, sizes, nets, read_NI.index_select(0, rows_P))
    given_PI = _second(kernels, nets, activated_PF, read_NI.shape[1])
    given_PI.mul_(parts_NQ.flatten().index_select(0, choices_P)[:, None])
    # The sums are in order: a token's summands come in the order of its experts' numbers.
    out_ND = torch.zeros_like(read_NI).index_add_(0, rows_P, given_PI)
    out_ND = _projected(kernels, weights.latent_out, out_ND)
    if weights.shared is None:
        return out_ND
    shared_ND = feed(kernels, sizes, weights.shared, x_ND)
    if not sizes.gates_shared:
        return out_ND.add_(shared_ND)
    return out_ND.add_(shared_ND.mul_(by_row(torch.sigmoid, scores_NO[:, -1:])))


def _in_best_groups(sizes: Experts, ranks_NX: Tensor) -> Tensor:
    """`ranks_NX` with -inf for the experts of all groups but the best ones."""
    if sizes.top_groups == sizes.num_groups:
        return ranks_NX
    groups = ranks_NX.view(len(ranks_NX), sizes.num_groups, -1)
    sums = groups.topk(min(sizes.group_best, groups.shape[2])).values.sum(-1)
    best = torch.zeros_like(sums, dtype=torch.bool)
    best.scatter_(1, sums.topk(sizes.top_groups).indices, value=True)
    return groups.masked_fill(~best[..., None], -torch.inf).view_as(ranks_NX)


def _projected(kernels: Kernels, packed: PackedLinear | None, x_NI: Tensor) -> Tensor:
    """The product of `x_NI` and a matrix, in new memory; `x_NI` itself without one."""
    if packed is None:
        return x_NI
    out_NO = x_NI.new_empty(x_NI.shape[0], packed.num_out)
    kernels.linear(x_NI, packed, out_NO)
    return out_NO


def by_expert(chosen: Sequence[Sequence[int]]) -> tuple[list[tuple[int, slice]], list[int]]:
    """Choices sorted by expert: each chosen expert with its slice of them, and the indices of the
    sorted choices among all, row by row."""
    flat = [expert for experts in chosen for expert in experts]
    order = sorted(range(len(flat)), key=flat.__getitem__)
    experts: list[tuple[int, slice]] = []
    first = 0
    for expert, group in groupby(flat[choice] for choice in order):
        end = first + sum(1 for _ in group)
        experts.append((expert, slice(first, end)))
        first = end
    return experts, order


# Names of the FFN, of its router, and of an expert's gate, up and down.
_NAMES = {
    ExpertNames.QWEN: ("mlp.", "gate", ("gate_proj", "up_proj", "down_proj")),
    ExpertNames.MIXTRAL: ("block_sparse_moe.", "gate", ("w1", "w3", "w2")),
    ExpertNames.GPT_OSS: ("mlp.", "router", ("gate_proj", "up_proj", "down_proj")),
    ExpertNames.GRANITE: ("block_sparse_moe.", "router.layer", ("", "", "")),
    ExpertNames.DEEPSEEK: ("mlp.", "gate", ("gate_proj", "up_proj", "down_proj")),
    ExpertNames.GEMMA: ("", "router.proj", ("gate_proj", "up_proj", "down_proj")),
}
_CHOICE_BIAS = "e_score_correction_bias"
_SHARED = {ExpertNames.DEEPSEEK: "shared_experts"}


def read_mixture(
    reader: WeightReader, sizes: Experts, layer: str, hidden_size: int
) -> MixtureWeights:
    """Read the mixture of `layer`, a prefix of names. Raises CheckpointError for a bad tensor."""
    prefix, router, parts = _NAMES[sizes.names]
    prefix = layer + prefix
    if f"{prefix}{router}.weight" not in reader:
        prefix, (_, router, parts) = f"{layer}mlp.", _NAMES[ExpertNames.QWEN]
    outputs = {f"{prefix}{router}": sizes.num_experts}
    shared = None
    if sizes.shared_ffn_size:
        if sizes.gates_shared:
            outputs[f"{prefix}shared_expert_gate"] = 1
        shared = _shared(reader, sizes, layer, prefix, hidden_size)
    weights = MixtureWeights(
        router=reader.linear(outputs, hidden_size),
        router_bias_X=reader.bias(outputs, present=sizes.biased),
        choice_bias_X=_choice_bias(reader, sizes, prefix, router),
        experts=_experts(
            reader, sizes, f"{prefix}experts.", parts, sizes.latent_size or hidden_size
        ),
        shared=shared,
    )
    if sizes.names is ExpertNames.GEMMA:
        name = f"{prefix}router.per_expert_scale"
        # Files of blocks in NVFP4 may have it in the scales of matrices.
        scale_X = reader.vector(name, sizes.num_experts) if name in reader else None
        return replace(weights, expert_scale_X=scale_X)
    if sizes.latent_size:
        into, back = (f"{prefix}fc{number}_latent_proj" for number in (1, 2))
        weights = replace(
            weights,
            latent_in=reader.linear({into: sizes.latent_size}, hidden_size),
            latent_out=reader.linear({back: hidden_size}, sizes.latent_size),
        )
    native = None if sizes.latent_size else reader.kernels.mixture
    return replace(weights, native=native(sizes, weights)) if native else weights


# What names of stacks do not have of the prefix of experts, and the stacks of gate and up, and of
# down: Qwen's and Granite's.
_FUSED = (
    ("", "gate_up_proj", "down_proj"),
    ("experts.", "input_linear.weight", "output_linear.weight"),
)


def _shared(
    reader: WeightReader, sizes: Experts, layer: str, prefix: str, hidden_size: int
) -> DenseWeights:
    ffn = sizes.shared_ffn_size
    if f"{layer}shared_mlp.input_linear.weight" in reader:  # Granite's
        return DenseWeights(
            reader.linear({f"{layer}shared_mlp.input_linear": 2 * ffn}, hidden_size),
            reader.linear({f"{layer}shared_mlp.output_linear": hidden_size}, ffn),
        )
    one = prefix + _SHARED.get(sizes.names, "shared_expert")
    names = [f"{one}.{part}" for part in _NAMES[ExpertNames.QWEN][2]]
    return _dense(reader, *_of_gate(sizes, names), sizes=(ffn, hidden_size))


def _choice_bias(reader: WeightReader, sizes: Experts, prefix: str, router: str) -> Tensor | None:
    if not sizes.has_choice_bias:
        return None
    whole, row = f"{prefix}{router}.{_CHOICE_BIAS}", f"{prefix}moe_statics.{_CHOICE_BIAS}"
    if row in reader:  # Ernie's
        return reader.vector(row, 1, sizes.num_experts)[0]
    own = f"{prefix}{_CHOICE_BIAS}"
    return reader.vector(own if own in reader else whole, sizes.num_experts)


def _experts(
    reader: WeightReader, sizes: Experts, prefix: str, parts: tuple[str, ...], hidden_size: int
) -> list[DenseWeights]:
    count, ffn = sizes.num_experts, sizes.ffn_size
    if any(f"{prefix}{part}_proj.weight" in reader for part in ("gate", "gate_up", "up")):
        return _stacked(reader, sizes, prefix, hidden_size)
    if sizes.names is ExpertNames.GPT_OSS:
        return _transposed(reader, sizes, prefix, hidden_size)
    stem, *stacks = _FUSED[sizes.names is ExpertNames.GRANITE]
    gate_up_name, down_name = (prefix.removesuffix(stem) + name for name in stacks)
    num_up = sizes.gate.num_up
    gate_up_name = gate_up_name if num_up > 1 else gate_up_name.replace("gate_up", "up")
    if gate_up_name in reader:
        gate_up = reader.stacked({gate_up_name: num_up * ffn}, count, hidden_size)
        down = reader.stacked({down_name: hidden_size}, count, ffn)
        return [DenseWeights(*pair) for pair in zip(gate_up, down, strict=True)]
    return [
        _dense(
            reader,
            *_of_gate(sizes, [f"{prefix}{number}.{part}" for part in parts]),
            sizes=(ffn, hidden_size),
        )
        for number in range(count)
    ]


def _of_gate(sizes: Experts, parts: Sequence[str]) -> Sequence[str]:
    """The matrices of gate, up and down that nets of these experts have."""
    return parts[-1 - sizes.gate.num_up :]


def _dense(reader: WeightReader, *names: str, sizes: tuple[int, int]) -> DenseWeights:
    ffn, hidden = sizes
    *first, down = names
    return DenseWeights(
        reader.linear(dict.fromkeys(first, ffn), hidden), reader.linear({down: hidden}, ffn)
    )


def _stacked(
    reader: WeightReader, sizes: Experts, prefix: str, hidden_size: int
) -> list[DenseWeights]:
    """Experts in the layout of GGUF files: one tensor each has gate, up and down of all experts, or
    one has gate and up."""
    count, ffn = sizes.num_experts, sizes.ffn_size
    halves = {f"{prefix}{part}_proj": ffn for part in ("gate", "up")[-sizes.gate.num_up :]}
    if f"{prefix}gate_up_proj.weight" in reader:
        halves = {f"{prefix}gate_up_proj": 2 * ffn}
    outputs = {f"{half}.weight": size for half, size in halves.items()}
    gate_up = reader.stacked(outputs, count, hidden_size)
    down = reader.stacked({f"{prefix}down_proj.weight": hidden_size}, count, ffn)
    if not sizes.biased:
        return [DenseWeights(*pair) for pair in zip(gate_up, down, strict=True)]
    biases = [reader.vector(f"{half}.bias", count, size) for half, size in halves.items()]
    first_XO = torch.cat(biases, dim=1)
    second_XD = reader.vector(f"{prefix}down_proj.bias", count, hidden_size)
    return [DenseWeights(*parts) for parts in zip(gate_up, down, first_XO, second_XD, strict=True)]


def _transposed(
    reader: WeightReader, sizes: Experts, prefix: str, hidden_size: int
) -> list[DenseWeights]:
    count, ffn = sizes.num_experts, sizes.ffn_size
    order_O = torch.arange(2 * ffn).view(-1, 2).T.flatten()
    gate_up = reader.stacked_conv(f"{prefix}gate_up_proj", count, hidden_size, 2 * ffn, order_O)
    down = reader.stacked_conv(f"{prefix}down_proj", count, ffn, hidden_size)
    first_XO = reader.vector(f"{prefix}gate_up_proj_bias", count, 2 * ffn)[:, order_O]
    second_XD = reader.vector(f"{prefix}down_proj_bias", count, hidden_size)
    return [
        DenseWeights(up, out, first_O.contiguous(), second_D)
        for up, out, first_O, second_D in zip(gate_up, down, first_XO, second_XD, strict=True)
    ]
