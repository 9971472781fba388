"""Mixture of experts.   out[t] = sum over k of r[t, k] * mlp(x[t]; expert index[t, k])

    mlp(x; e) = W2[e] a(W1[e] x + b1[e]) + b2[e],   gate and up = the two halves of W1 x + b1, or every second value,
    a = act(alpha * g) / alpha * (u + shift),   g = min(gate, limit),   u = up within +-limit

    x: [T, H]   W1: [E, 2I, H]   W2: [E, H, I]   b1: [E, 2I]   b2: [E, H]   index, r: [T, K]   S = T K rows

Backward, for a row s of token t and expert e, with u[s] = W2[e]^T dout[t]:

    dr[s] = a[s] u[s] + b2[e] dout[t]      dW2[e] = sum over s of dout[t] (r a)[s]^T      db2[e] = sum of r dout[t]
    d(gate, up)[s] from r u[s]             dW1[e] = sum of d(gate, up)[s] x[t]^T          db1[e] = sum of d(gate, up)
    dx[t] = sum over k of W1[e]^T d(gate, up)[s]

so the routing weights need no outputs of experts, and nothing of [S, H] is kept.

Rows    are sorted by expert on the device (`_moe_routing.py`). Forward gathers them from x in the loads of the product;
        backward copies those of dout and x into slots (`_moe_row_kernels.py`). Two products forward, four backward; the
        rows of a token are added in the order of k, in fp32.
Casts   x's dtype: gate and up where they are kept, a, u, the rows of the second product, d(gate, up). All sums in fp32.
Memory  keeps gate and up, 2I values a row, beside the inputs; backward recomputes a. In transit: I + H values a row
        forward; 4I + H, then 2I + H backward, in slots: up to 127 more an expert (63 in fp32).
        Moved beyond the products' operands: forward writes 2I + I + H values a row and reads I + H; backward writes
        H + I + 3I + H + H, reads 3I for the gate and H for the sum.
Papers  Shazeer et al., arXiv:1701.06538; the derivative of the routing weights: "SonicMoE", arXiv:2512.14080
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel.ops._moe_launch import (
    Gate,
    bias_grad,
    combine,
    first_tiles,
    gate_backward,
    gather,
    plan_of,
    route_grad,
    rows_product,
    up_product,
    weight_grad,
)
from liger_kernel.ops._moe_routing import Routing, moe_routing, most_tiles
from liger_kernel.ops._moe_torch import fallback, gated
from liger_kernel.ops._op import (
    Cost,
    Op,
    autocast_dtype,
    choice,
    dense,
    first_order,
    named,
    require,
    rows,
)
from liger_kernel.ops._triton import tl

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

# 1 reference


def reference(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, index: Tensor, weights: Tensor,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, activation: str = "silu",
    interleaved: bool = False, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0,
) -> Tensor:  # fmt: skip
    """The definition, expert by expert as Hugging Face's modules go."""
    out = torch.zeros_like(x)
    linear = torch.nn.functional.linear
    for e in range(gate_up_proj.shape[0]):
        token, slot = torch.where(index == e)
        bias1, bias2 = (None if b is None else b[e] for b in (gate_up_bias, down_bias))
        both = linear(x[token], gate_up_proj[e], bias1)
        y = linear(gated(both, activation, interleaved, limit, alpha, shift), down_proj[e], bias2)
        out = out.index_add(0, token, (y * weights[token, slot, None]).to(x.dtype))
    return out


# 2 launch


def _fake_forward(
    x, gate_up, down, index, weights, bias1, bias2, activation, interleaved, limit, alpha, shift, keep
):  # fmt: skip
    pairs, n_experts = index.numel(), gate_up.shape[0]
    tiles = most_tiles(pairs, n_experts, plan_of(x).up.rows)
    both = x.new_empty((pairs, gate_up.shape[1]) if keep else 0)
    shapes = ((pairs,), (pairs,), (pairs,), (n_experts,), (n_experts + 1,), (tiles, 3), (1,))
    return x.new_empty(x.shape), both, *(index.new_empty(s, dtype=torch.int32) for s in shapes)


@named(
    "(Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weights, Tensor? bias1, Tensor? bias2,"
    " str activation, bool interleaved, float? limit, float alpha, float shift, bool keep) -> "
    f"({', '.join(['Tensor'] * 9)})",
    _fake_forward,
)
def fused_moe_forward_kernel(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, bias1: Tensor | None,
    bias2: Tensor | None, activation: str, interleaved: bool, limit: float | None, alpha: float, shift: float,
    keep: bool,
) -> Any:  # fmt: skip
    """-> out like x, gate and up (empty unless `keep`), and a `Routing`."""
    plan, gate = plan_of(x), Gate(activation, interleaved, limit, alpha, shift)
    routing = Routing(*moe_routing(index, gate_up.shape[0], plan.up.rows))
    y, both = up_product(rows(x), gate_up, bias1, routing, plan, gate, keep)
    y = rows_product(y, down, bias2, routing, plan)
    out = combine(y, dense(weights), routing, x.shape[0])
    return out, both, *routing


def _fake_backward(dy, x, gate_up, down, index, weights, bias1, bias2, *rest):
    inputs = (x, gate_up, down, weights, bias1, bias2)
    return tuple(
        torch.empty_like(t) if t is not None and need else x.new_empty(0)
        for t, need in zip(inputs, rest[-1], strict=True)
    )


@named(
    "(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weights, Tensor? bias1, Tensor? bias2,"
    " Tensor both, Tensor[] routing, str activation, bool interleaved, float? limit, float alpha, float shift,"
    f" bool[] needs) -> ({', '.join(['Tensor'] * 6)})",
    _fake_backward,
)
def fused_moe_backward_kernel(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, bias1: Tensor | None,
    bias2: Tensor | None, both: Tensor, routing: list[Tensor], activation: str, interleaved: bool,
    limit: float | None, alpha: float, shift: float, needs: list[bool],
) -> Any:  # fmt: skip
    """-> gradients of x, gate_up, down, weights, bias1, bias2; one that is not needed is empty."""
    plan, gate = plan_of(x), Gate(activation, interleaved, limit, alpha, shift)
    places = Routing(*routing)
    grads = [x.new_empty(0) for _ in needs]
    need_x, need_up, need_down, need_weights, need_bias1, need_bias2 = needs
    dy, r, tokens = rows(dy), dense(weights), x.shape[0]
    wanted = (need_x or need_up or need_bias1, need_down, need_weights)
    sums = (
        need_up or need_down or need_bias1 or need_bias2
    )  # over an expert's rows: not for frozen experts
    first = first_tiles(places, plan) if sums else places.totals
    dy_slots = gather(dy, places, plan) if any(wanted) or need_bias2 else dy
    dboth = weighted = row_sums = both
    if any(wanted):
        u = rows_product(
            dy_slots, down.transpose(1, 2), None, places, plan, a_slots=True, y_slots=True
        )
        dboth, weighted, row_sums = gate_backward(u, both, r, places, plan, gate, wanted)
        del u
    if need_down:
        grads[2] = torch.empty_like(down)
        weight_grad(grads[2], dy_slots, weighted, first, places, plan)
    if need_bias2 and bias2 is not None:
        grads[5] = bias_grad(dy_slots, r, first, places, plan, bias2)
    del weighted, dy_slots
    if need_weights:
        grads[3] = route_grad(row_sums, dy, bias2, index, weights, places)
    if need_up:
        grads[1] = torch.empty_like(gate_up)
        weight_grad(grads[1], dboth, gather(rows(x), places, plan), first, places, plan)
    if need_bias1 and bias1 is not None:
        grads[4] = bias_grad(dboth, None, first, places, plan, bias1)
    if need_x:
        dx_rows = rows_product(dboth, gate_up.transpose(1, 2), None, places, plan, a_slots=True)
        grads[0] = combine(dx_rows, None, places, tokens)
    return tuple(grads)


# 3 op


class _FusedMoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keep: bool, *args: Any) -> Tensor:
        out, both, *routing = fused_moe_forward_kernel(*args, keep)
        tensors, ctx.options = args[:7], args[7:]
        if keep:
            ctx.save_for_backward(*tensors, both, *routing)
        return out

    @staticmethod
    @first_order("fused_moe")
    def backward(ctx: Any, dy: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: a checkpoint gives each of them one time
        *tensors, both = saved[:8]
        routing, need = list(saved[8:]), ctx.needs_input_grad[1:8]
        needs = [n for i, n in enumerate(need) if i != 3]
        grads = fused_moe_backward_kernel(dy, *tensors, both, routing, *ctx.options, needs)
        found = [g if n else None for g, n in zip(grads, needs, strict=True)]
        return None, *found[:3], None, *found[3:], None, None, None, None, None


def _kernels(*args: Any) -> Tensor:
    floats = [t for t in args[:7] if isinstance(t, Tensor)]
    return _FusedMoE.apply(torch.is_grad_enabled() and any(t.requires_grad for t in floats), *args)


def supports(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, *rest: Any
) -> str | None:
    """One device, one dtype but for the routing weights."""
    tensors = [t for t in (x, gate_up, down, *rest[:2]) if t is not None]
    if any(t.dtype != x.dtype for t in tensors):
        return f"x and the experts differ in dtype: {', '.join(str(t.dtype) for t in tensors)}"
    if any(t.device != x.device for t in (*tensors, index, weights)):
        return "tensors are on different devices"
    if not hasattr(tl, "gather"):
        return "it needs Triton 3.3"
    return None


def cost(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, *_: Any) -> Cost:
    """x, experts, routing in and out once; three products of S rows forward, six backward, of H x I each."""
    weights = (gate_up.numel() + down.numel()) * x.element_size()
    n, pairs, inner = x.numel() * x.element_size(), index.numel(), down.shape[2]
    return Cost(
        forward_bytes=2 * n + weights + 12 * pairs,
        backward_bytes=3 * n + 2 * weights + 16 * pairs,
        saved=2 * inner * pairs * x.element_size(),
        flops=18 * pairs * x.shape[-1] * inner,
    )


OP = Op("fused_moe", reference, fallback, _kernels, supports, cost)

# 4 public


def fused_moe(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, activation: str = "silu",
    interleaved: bool = False, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0,
    impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Gated experts of chosen tokens, weighted and added.

    Args:
        x: `[*, H]`, any strides; fp16, bf16, fp32 (fp64 on the torch path).
        gate_up_proj: `[E, 2I, H]` in x's dtype. Weights stored as `[E, H, 2I]` enter as `w.transpose(1, 2)`, which is
            not copied; gradients have the strides of their weights.
        down_proj: `[E, H, I]`, likewise.
        top_k_index: `[*, K]` integers. One outside [0, E) belongs to nobody: it adds nothing, and its weight gets a
            gradient of 0. An expert may come twice in a row.
        top_k_weights: `[*, K]`, of any of the dtypes.
        gate_up_bias, down_bias: `[E, 2I]`, `[E, H]` in x's dtype, or None.
        activation: "silu", "gelu", "gelu_tanh".
        interleaved: gate and up are every second row of gate_up_proj, gate first; otherwise its two halves.
        limit: clamps gate from above and up to both sides.
        alpha: act(alpha * gate) / alpha stands for act(gate).
        shift: added to up. GPT-OSS has silu, limit 7, alpha 1.702, shift 1, interleaved.
        impl: "triton" or "torch" for this call, None for the default choice.
    Returns:
        `[*, H]` in x's dtype, contiguous. Under autocast x, experts and biases are cast to its dtype first.
    Memory:
        Keeps gate and up, 2I values for each of the T * K rows, beside its inputs. Nothing waits for the host.
    Raises:
        ValueError: shapes that do not belong together, an index that is no integer, an unknown activation.
    """
    choice("fused_moe", "activation", activation, ACTIVATIONS)
    _check_shapes(x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias)
    tensors = [x.reshape(-1, x.shape[-1]), gate_up_proj, down_proj]
    biases = [gate_up_bias, down_bias]
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        tensors = [t.to(dtype) for t in tensors]
        biases = [None if b is None else b.to(dtype) for b in biases]
    top_k = top_k_index.shape[-1]
    routing = (top_k_index.reshape(-1, top_k), top_k_weights.reshape(-1, top_k))
    options = (activation, interleaved, limit, alpha, shift)
    out = OP(*tensors, *routing, *biases, *options, impl=impl)
    return out.to(x.dtype).reshape(x.shape)


def _check_shapes(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, bias1: Tensor | None,
    bias2: Tensor | None,
) -> None:  # fmt: skip
    shapes = f"x {list(x.shape)}, gate_up_proj {list(gate_up.shape)}, down_proj {list(down.shape)}"
    require(
        x.dim() > 0 and gate_up.dim() == 3 and down.dim() == 3
        and gate_up.shape == (down.shape[0], 2 * down.shape[2], down.shape[1]) and down.shape[1] == x.shape[-1],
        f"fused_moe: x must be [*, H], gate_up_proj [E, 2I, H], down_proj [E, H, I]; got {shapes}. Weights stored as "
        "[E, in, out] enter as w.transpose(1, 2).",
    )  # fmt: skip
    require(
        index.shape == weights.shape
        and index.shape[:-1] == x.shape[:-1]
        and index.dim() == x.dim(),
        f"fused_moe: top_k_index and top_k_weights must be [*, K] for x {list(x.shape)}; got {list(index.shape)} and "
        f"{list(weights.shape)}.",
    )
    require(
        not (index.is_floating_point() or index.dtype == torch.bool),
        f"fused_moe: top_k_index must hold integers; got {index.dtype}.",
    )
    for name, bias, weight in (("gate_up_bias", bias1, gate_up), ("down_bias", bias2, down)):
        require(
            bias is None or bias.shape == weight.shape[:2],
            f"fused_moe: {name} must be {list(weight.shape[:2])}; got {None if bias is None else list(bias.shape)}.",
        )


# The names other libraries call

BLOCK_M_TOKEN = 64


class LigerFusedMoEFunction:
    """`apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights)` is `fused_moe`."""

    @staticmethod
    def apply(
        x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:  # fmt: skip
        return fused_moe(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


def compute_routing_metadata(
    topk_indices: Tensor, E: int, block_m_token: int = BLOCK_M_TOKEN
) -> Routing:
    """The `Routing` of indices `[T, K]`, by the kernels: pair, token, position, totals, offsets, tiles, n_tiles."""
    return Routing(*moe_routing(topk_indices, E, block_m_token))
