"""What parts of a block keep for backward, per token.

Read off transformers' own models with fused attention (`scaled_dot_product_attention`), which
keeps no matrix of attention weights; the tests count what autograd really saves and compare.
"""

from __future__ import annotations

from onecopy.planner.shapes import Saved

__all__ = [
    "attention",
    "dropout",
    "experts",
    "gated_mlp",
    "layer_norm",
    "mlp",
    "rms_norm",
    "t5_attention",
    "t5_feed_forward",
]

# Values that an activation function and the linear after it keep. "gelu_new" is written out in
# elementary operations; relu keeps its result alone, which is the linear's input.
KEPT_BY_ACTIVATION = {"gelu_new": 5, "relu": 1}


def layer_norm(width: int) -> Saved:
    """Input, result (the input of what follows), mean and deviation."""
    return Saved(compute=2 * width + 2)


def rms_norm(width: int) -> Saved:
    """The input in fp32 and its factor; the normalised value and the result."""
    return Saved(compute=2 * width, fp32=width + 1)


def attention(query: int, key: int, heads: int) -> Saved:
    """Queries, keys, values, the result, and a number for each head."""
    return Saved(compute=2 * query + 2 * key, fp32=heads)


def mlp(intermediate: int, activation: str) -> Saved:
    """Before and after the activation function."""
    return Saved(compute=KEPT_BY_ACTIVATION.get(activation, 2) * intermediate)


def gated_mlp(intermediate: int) -> Saved:
    """Gate, activated gate, other half, product."""
    return Saved(compute=4 * intermediate)


def experts(hidden: int, intermediate: int, num_experts: int, chosen: int) -> Saved:
    """Each chosen expert's copy of the token, gated MLP and result, and the router's numbers."""
    return Saved(compute=chosen * (4 * intermediate + 2 * hidden), fp32=num_experts + 10 * chosen)


def dropout(width: int, is_used: bool) -> Saved:
    """A mask of bytes, as accelerators keep it."""
    return Saved(masks=width if is_used else 0)


def t5_attention(hidden: int, query: int, heads: int) -> Saved:
    """T5's attention learns a bias for each distance, so its weights are written out, in fp32."""
    norm = rms_norm(hidden)
    return norm + Saved(compute=query, fp32=3 * query, positions=heads)


def t5_feed_forward(hidden: int, intermediate: int, activation: str, is_gated: bool) -> Saved:
    """Norm and MLP; where it is gated, the other half and the product too."""
    inner = mlp(intermediate, activation)
    if is_gated:
        inner += Saved(compute=2 * intermediate)
    return rms_norm(hidden) + inner
