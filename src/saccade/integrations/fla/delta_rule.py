"""fla's gated delta rule and Kimi Delta Attention, by saccade.gated_delta_rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade.integrations.fla.arguments import (
    check_chunk,
    check_copy,
    check_count,
    check_flag,
    check_heads,
    check_offsets,
    check_rows,
    check_shape,
    check_unknown,
)

State = Tensor | None
STEPS = 8  # tokens that change a copy of the state one by one, where no gradient is wanted


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    chunk_size: int | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, State]:
    """The gated delta rule with one decay a head.

    Args:
        q, k: (B, T, H, K). v: (B, T, HV, V), where H divides HV.
        g: (B, T, HV) logarithms of the decay; with use_gate_in_kernel what the decay is made of,
            -exp(A_log) * softplus(g + dt_bias), by A_log (HV,) and dt_bias (HV,) or None.
        beta: (B, T, HV); with use_beta_sigmoid_in_kernel its sigmoid is taken, and with
            allow_neg_eigval twice that.
        scale: of the output; K ** -0.5 where None.
        initial_state: (N, HV, K, V), or (N, HV, V, K) with state_v_first.
        output_final_state: whether to return the last state, in the same layout.
        use_qk_l2norm_in_kernel: whether to divide rows of q and k by their lengths.
        cu_seqlens: [N + 1] offsets of packed sequences, with B = 1.
        cu_seqlens_cpu, chunk_indices, chunk_size: hints, which saccade does not need.
        cp_context: None: there is no context parallelism.

    Returns:
        (B, T, HV, V), and the last state in float32 or None.

    Examples:
        >>> from saccade.integrations.fla import chunk_gated_delta_rule
        >>> q, k, v = torch.randn(3, 1, 32, 2, 16)
        >>> g, beta = torch.nn.functional.logsigmoid(torch.randn(1, 32, 2)), torch.rand(1, 32, 2)
        >>> output, state = chunk_gated_delta_rule(
        ...     q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> output.shape, state.shape
        (torch.Size([1, 32, 2, 16]), torch.Size([1, 2, 16, 16]))
    """
    _check(chunk_gated_delta_rule, unknown, q, k, v, cu_seqlens, use_gate_in_kernel)
    _check_hints(cu_seqlens, cu_seqlens_cpu, chunk_size, cp_context)
    check_shape("g", g, "(B, T, HV)", v.shape[:-1], q)
    return _call(
        (q, k, v), _gate(g, A_log, dt_bias) if use_gate_in_kernel else g,
        _rate(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, State]:
    """`chunk_gated_delta_rule` with a decay of each channel besides; for single tokens, too.

    Args:
        g: (B, T, HV) or None. gk: (B, T, HV, K) or None, added to g.
        gv: None: values' channels have no decay of their own.
        beta: (B, T, HV); 1 where None.
        others: as in `chunk_gated_delta_rule`.

    Examples:
        >>> from saccade.integrations.fla import fused_recurrent_gated_delta_rule
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)
        >>> output, state = fused_recurrent_gated_delta_rule(
        ...     q, k, v, beta=torch.rand(2, 1, 4), output_final_state=True)
        >>> state.shape
        torch.Size([2, 4, 16, 16])
    """
    _check(fused_recurrent_gated_delta_rule, unknown, q, k, v, cu_seqlens, use_gate_in_kernel)
    if gv is not None:
        raise NotImplementedError("gv: got a tensor, takes None: decay is by rows of the state")
    if g is not None:
        check_shape("g", g, "(B, T, HV)", v.shape[:-1], q)
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias)
    if gk is not None:
        check_shape("gk", gk, "(B, T, HV, K)", (*v.shape[:-1], k.shape[-1]), q)
        g = gk if g is None else g.unsqueeze(-1) + gk
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    return _call(
        (q, k, v), g, _rate(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale,
        initial_state, output_final_state, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens,
    )  # fmt: skip


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    chunk_size: int | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, State]:
    """Kimi Delta Attention: the gated delta rule with a decay of each channel.

    Args:
        g: (B, T, HV, K); with use_gate_in_kernel what the decay is made of, by A_log (HV,) and
            dt_bias (HV * K,), either of which may be None: -exp(A_log) * softplus(g + dt_bias), or
            with lower_bound that times sigmoid(exp(A_log) * (g + dt_bias)).
        safe_gate, disable_recompute, use_graph, max_num_seqs, chunk_size: hints, which saccade
            does not need: results do not depend on them.
        return_intermediate_states: False: states between chunks are not kept.
        others: as in `chunk_gated_delta_rule`.

    Examples:
        >>> from saccade.integrations.fla import chunk_kda
        >>> q, k, v = torch.randn(3, 1, 32, 2, 16)
        >>> g, beta = -torch.rand(1, 32, 2, 16), torch.rand(1, 32, 2)
        >>> chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0].shape
        torch.Size([1, 32, 2, 16])
    """
    _check(chunk_kda, unknown, q, k, v, cu_seqlens, use_gate_in_kernel)
    if return_intermediate_states:
        raise NotImplementedError(
            "return_intermediate_states: got True, takes False: states between chunks are not kept"
        )
    _check_hints(cu_seqlens, cu_seqlens_cpu, chunk_size, cp_context)
    return fused_recurrent_kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        lower_bound, state_v_first, cu_seqlens,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, State]:
    """`chunk_kda` with fewer options; for single tokens, too.

    Examples:
        >>> from saccade.integrations.fla import fused_recurrent_kda
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)
        >>> g, beta = -torch.rand(2, 1, 4, 16), torch.rand(2, 1, 4)
        >>> fused_recurrent_kda(q, k, v, g, beta)[0].shape
        torch.Size([2, 1, 4, 16])
    """
    _check(fused_recurrent_kda, unknown, q, k, v, cu_seqlens, use_gate_in_kernel)
    check_shape("g", g, "(B, T, HV, K)", (*v.shape[:-1], k.shape[-1]), q)
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, lower_bound)
    return _call(
        (q, k, v), g, _rate(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale,
        initial_state, output_final_state, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens,
    )  # fmt: skip


def _call(
    rows: tuple[Tensor, Tensor, Tensor],
    decay: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: State,
    output_final_state: bool,
    normalize_qk: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, State]:
    """The gated delta rule in fla's layout."""
    check_flag("output_final_state", output_final_state)
    check_flag("use_qk_l2norm_in_kernel", normalize_qk)
    check_flag("state_v_first", state_v_first)
    q, _, v = rows
    if initial_state is not None:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        form, sizes = "(N, HV, K, V)", (q.shape[-1], v.shape[-1])
        if state_v_first:
            form, sizes = "(N, HV, V, K) with state_v_first", (v.shape[-1], q.shape[-1])
        shape = sequences, v.shape[2], *sizes
        check_shape("initial_state", initial_state, form, shape, q)
        initial_state = initial_state.mT if state_v_first else initial_state
    tensors: list[Any] = [*rows, beta, decay]
    options: dict[str, Any] = {"normalize_qk": normalize_qk, "scale": scale}
    if cu_seqlens is not None:
        *packed, decay = (None if each is None else each.squeeze(0) for each in tensors)
        call: Any = saccade.gated_delta_rule_varlen
        options |= {"decay": decay, "initial_state": initial_state, "return_state": True}
        output, state = call(*packed, cu_seqlens.to(torch.int32), **options)
        output = output.unsqueeze(0)
    else:
        dense: list[Any] = [each if each is None else each.transpose(1, 2) for each in tensors]
        decay = dense.pop()
        output, state = _dense(dense, initial_state, options | {"decay": decay})
        output = output.transpose(1, 2)
    if not output_final_state:
        return output, None
    return output, state.mT if state_v_first else state


def _dense(
    rows: list[Tensor], initial_state: State, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and last state; of a few tokens without gradients by steps on a copy of the state."""
    tensors = [each for each in (*rows, options["decay"], initial_state) if each is not None]
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if wanted or initial_state is None or rows[0].shape[2] > STEPS:
        call: Any = saccade.gated_delta_rule
        return call(*rows, initial_state=initial_state, return_state=True, **options)
    wide = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    state = initial_state.to(wide, copy=True)
    return saccade.gated_delta_rule_step(state, *rows, **options), state


def _gate(
    g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """Logarithms of decay, from what a model's layer gives: of each head, or of each channel."""
    if g is None:
        raise ValueError("g: got None, takes a tensor with use_gate_in_kernel=True")
    if A_log is None and lower_bound is None:
        raise ValueError("A_log: got None, takes a tensor (HV,) with use_gate_in_kernel=True")
    if A_log is not None:
        check_count("A_log", A_log, "(HV,)", g.shape[2:3])
    g = _wide(g)
    if dt_bias is not None:
        form = "(HV,)" if g.dim() == 3 else "(HV * K,)"
        check_count("dt_bias", dt_bias, form, (g.shape[2:].numel(),))
        g = g + _wide(dt_bias).view(g.shape[2:])
    factor = None if A_log is None else _wide(A_log).exp().view(-1, *[1] * (g.dim() - 3))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(g if factor is None else factor * g)
    assert factor is not None
    return -factor * torch.nn.functional.softplus(g)


def _rate(beta: Tensor, v: Tensor, sigmoid: bool, twice: bool) -> Tensor:
    """beta, from its logits where it is given by them."""
    check_shape("beta", beta, "(B, T, HV)", v.shape[:-1], v)
    check_flag("use_beta_sigmoid_in_kernel", sigmoid)
    check_flag("allow_neg_eigval", twice)
    if twice and not sigmoid:
        raise ValueError("allow_neg_eigval: got True, takes it with use_beta_sigmoid_in_kernel")
    if not sigmoid:
        return beta
    return torch.sigmoid(_wide(beta)) * (2.0 if twice else 1.0)


def _wide(tensor: Tensor) -> Tensor:
    """In float32, in which fla computes gates; float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _check(
    function: Callable[..., Any],
    unknown: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    use_gate_in_kernel: bool,
) -> None:
    """Refuse options that there are not, and rows and offsets that do not fit together."""
    check_unknown(unknown, function)
    check_flag("use_gate_in_kernel", use_gate_in_kernel)
    check_rows(q, k, v)
    check_heads(q, v)
    check_offsets(cu_seqlens, q)


def _check_hints(
    cu_seqlens: Tensor | None, copy: Tensor | None, chunk_size: int | None, cp_context: Any
) -> None:
    """Refuse hints that contradict the call, and context parallelism."""
    check_copy(copy, cu_seqlens)
    check_chunk(chunk_size)
    if cp_context is not None:
        raise NotImplementedError(f"cp_context: got {type(cp_context).__name__}, takes None")
