"""The optimized branch: DiffSynth's MiniMax-H3 with the three changes of the seed job's pull request.

sdpa     attention through torch's SDPA, with the backends in order of preference and cuDNN first
compile  the element-wise body of a DiT block (RoPE, AdaLN gathers, RMSNorm, SwiGLU, gates) fused by `torch.compile`,
         and the bounds of the packed sequence read once per forward pass, not once per block
sac      selective activation checkpointing: a block's recomputation keeps the attention output and redoes the rest

`apply` puts them into DiffSynth's classes before a model is made. Blocks, attention, MLP and linear layers are still
called as modules; the four RMSNorms of a block are not, for they are part of fused kernels.

Shapes: N tokens, H heads, D head width, C hidden width, M rows of AdaLN parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from diffsynth.models import minimax_h3_dit as h3
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

OPTIMIZATIONS = ("sdpa", "compile", "sac")

ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

KEPT_OPERATORS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
    }
)
"""What SDPA becomes below autograd. Its MATH backend is no operator of its own, and is recomputed."""

original_checkpoint = h3.gradient_checkpoint_forward


def apply(chosen: Iterable[str] | None = None) -> None:
    """Patch DiffSynth's classes.

    Args:
        chosen: Which of `OPTIMIZATIONS`; all of them where None.

    Raises:
        SystemExit: A name is not one of `OPTIMIZATIONS`.
    """
    names = set(OPTIMIZATIONS if chosen is None else chosen)
    unknown = sorted(names.difference(OPTIMIZATIONS))
    if unknown:
        sys.exit(f"--optimizations: {unknown[0]!r} is unknown; {', '.join(OPTIMIZATIONS)} are allowed.")
    if "sdpa" in names:
        h3.attention_forward = sdpa_attention
    if "compile" in names:
        from torch._inductor import config

        # The graphs are few and small: a pool of compile workers in each rank would take longer to start than to use.
        config.compile_threads = 1
        h3._sdpa_varlen_attention = varlen_attention
        h3.MiniMaxH3Attention.forward = attention_forward
        h3.MiniMaxH3MLP.forward = mlp_forward
        h3.MiniMaxH3DiTBlock.forward = block_forward
    if "sac" in names:
        h3.gradient_checkpoint_forward = checkpoint_keeping_attention


def sdpa_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Attend through torch's SDPA with the first backend that takes the inputs.

    Args:
        q: Queries [1, H, N, D]; `k` and `v` alike.
        scale: Factor of the scores before the softmax.
    """
    with sdpa_kernel(ATTENTION_BACKENDS, set_priority=True):
        return functional.scaled_dot_product_attention(q, k, v, scale=scale)


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Attend within each segment of a packed sequence.

    Args:
        q: Queries [N, H, D]; `k` and `v` alike.
        cu_seqlens: Bounds of the segments, int32 [segments + 1], from 0 to N.
        softmax_scale: Factor of the scores before the softmax.
    """
    bounds = read_bounds(cu_seqlens)
    segments = [
        h3.attention_forward(
            *(t[start:stop].transpose(0, 1).unsqueeze(0) for t in (q, k, v)), scale=softmax_scale
        ).squeeze(0).transpose(0, 1)
        for start, stop in pairwise(bounds)
        if stop > start
    ]  # fmt: skip
    return torch.cat(segments)


def read_bounds(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Return the bounds as numbers, and wait for the device only the first time.

    All blocks of a forward pass, and their recomputations, are given the same tensor; it keeps its bounds.
    """
    bounds: tuple[int, ...] | None = getattr(cu_seqlens, "_bounds", None)
    if bounds is None:
        bounds = cu_seqlens._bounds = tuple(cu_seqlens.tolist())
    return bounds


def fused(*, dynamic: bool) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Compile a function of tensors so that it can be called within selective checkpointing.

    Selective checkpointing watches operators through a dispatch mode. It would also watch those that the compiler
    traces in the first call and number them among the block's own; the compiler, for its part, fails at the marks that
    the mode leaves in its graph (seen with torch 2.14). So the mode is off inside: what is fused here is recomputed as
    a whole.

    Args:
        dynamic: Whether one graph serves all sizes.
    """

    def decorate(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        compiled = torch.compile(function, dynamic=dynamic)

        @wraps(function)
        def call(*args: Any) -> torch.Tensor:
            with _disable_current_modes():
                return compiled(*args)

        return call

    return decorate


@fused(dynamic=False)
def norm_rope(x: torch.Tensor, weight: torch.Tensor, eps: float, freqs: torch.Tensor) -> torch.Tensor:
    """Normalize each head and turn it by its token's position.

    Args:
        x: Queries or keys [N, H, D].
        weight: Scale of the norm [D].
        eps: Added to the mean square.
        freqs: Angles [N, R] in fp32, R not above D.
    """
    return h3._apply_rope(functional.rms_norm(x, weight.shape, weight, eps), freqs)


@fused(dynamic=False)
def norm_modulate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, shift: torch.Tensor, scale: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    """Normalize each token, then scale and shift it by its row of AdaLN parameters.

    Args:
        x: Tokens [N, C].
        weight: Scale of the norm [C].
        eps: Added to the mean square.
        shift: [M, C]; `scale` alike.
        indices: Row of each token, int64 [N].
    """
    return h3._modulate_scale_shift(functional.rms_norm(x, weight.shape, weight, eps), shift, scale, indices)


@fused(dynamic=False)
def gate_residual(
    x: torch.Tensor, gate: torch.Tensor, other: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Add a branch to the residual stream, each token gated by its row of AdaLN parameters.

    Args:
        x: Residual stream [N, C]; `other`, the branch, alike.
        gate: [M, C].
        indices: Row of each token, int64 [N].
    """
    return h3._modulate_gate(x, gate, other, indices)


# The token refiner runs it on a short sequence before the blocks run it on a long one: one graph for both.
@fused(dynamic=True)
def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Gate one half of the features [N, 2 F] by the SiLU of the other; [N, F]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def attention_forward(
    self: Any, x: torch.Tensor, *, rope_freqs: torch.Tensor | None, cu_seqlens: torch.Tensor, max_seqlen: Any = None
) -> torch.Tensor:
    """Stand in for `MiniMaxH3Attention.forward`, with norm and RoPE in one kernel."""
    q, k, v = self.qkv_proj(x).view(x.shape[0], self.num_heads, 3, self.head_dim).unbind(2)
    if rope_freqs is None:
        q, k = self.q_norm(q), self.k_norm(k)
    else:
        q = norm_rope(q, self.q_norm.weight, self.q_norm.eps, rope_freqs)
        k = norm_rope(k, self.k_norm.weight, self.k_norm.eps, rope_freqs)
    out = h3._sdpa_varlen_attention(q, k, v, cu_seqlens=cu_seqlens, softmax_scale=self.softmax_scale)
    return self.out_proj(out.reshape(x.shape[0], -1))


def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Stand in for `MiniMaxH3MLP.forward`, with SwiGLU in one kernel."""
    return self.fc2(swiglu(self.fc1(x)))


def block_forward(
    self: Any,
    x: torch.Tensor,
    *,
    t_emb: torch.Tensor,
    combined_indices: torch.Tensor,
    rope_freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
) -> torch.Tensor:
    """Stand in for `MiniMaxH3DiTBlock.forward`, with norm, gather and modulation in one kernel."""
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaln_proj(t_emb)
    h = norm_modulate(x, self.norm1.weight, self.norm1.eps, shift_msa, scale_msa, combined_indices)
    h = self.attn(h, rope_freqs=rope_freqs, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    x = gate_residual(x, gate_msa, h, combined_indices)
    h = norm_modulate(x, self.norm2.weight, self.norm2.eps, shift_mlp, scale_mlp, combined_indices)
    return gate_residual(x, gate_mlp, self.mlp(h), combined_indices)


def keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Say for each operator of a block whether its result is kept for backward."""
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_keeping_attention(
    model: Any, use_gradient_checkpointing: bool, use_gradient_checkpointing_offload: bool, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for `gradient_checkpoint_forward`: recompute a block, but not its attention."""
    if not use_gradient_checkpointing or use_gradient_checkpointing_offload:
        return original_checkpoint(
            model, use_gradient_checkpointing, use_gradient_checkpointing_offload, *args, **kwargs
        )
    contexts = partial(create_selective_checkpoint_contexts, keep_attention)
    return checkpoint(model, *args, use_reentrant=False, context_fn=contexts, **kwargs)
