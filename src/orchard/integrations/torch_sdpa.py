"""Routing of torch's own scaled_dot_product_attention to Orchard, while it is enabled.

Three places, because torch has three ways into attention:
- the operator aten::scaled_dot_product_attention, for every eager call under any name;
- torch.compile's tracer, which then sees Orchard's call instead of the operator;
- the fused inference path of nn.MultiheadAttention and nn.TransformerEncoderLayer, switched off.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from orchard.attention import compat
from orchard.attention.compat import scaled_dot_product_attention, serve, why_torch
from orchard.attention.problem import is_traced
from orchard.dispatch.backend import Reason
from orchard.dispatch.journal import journal
from orchard.errors import IntegrationWarning

_KEYS = (
    # Autograd first: a training call in another thread must not meet the others alone.
    *("AutogradCPU", "AutogradCUDA", "AutogradMPS", "CPU", "CUDA", "MPS"),
    *("NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"),  # only to count them
)
_operator = torch.ops.aten.scaled_dot_product_attention.default


class _State:
    """What is changed while enabled, and what to put back."""

    def __init__(self) -> None:
        self.renew_lock()
        self.depth = 0
        self.overrides: library.Library | None = None
        self.fastpath = True
        self.tracer_hooked = False
        # Kernels that a call in another thread may still be entering; torch would free them.
        self.retired: deque[list[Any]] = deque(maxlen=1024)

    def renew_lock(self) -> None:
        self.lock = threading.Lock()


_state = _State()
if hasattr(os, "register_at_fork"):  # another thread may hold the lock while this one forks
    os.register_at_fork(after_in_child=_state.renew_lock)
_active = False  # read by traced code, which is compiled again when it changes


def enable() -> None:
    """Serve every call of torch's scaled_dot_product_attention in this process with Orchard.

    Calls nest: as many `disable()` as `enable()` restore torch exactly.
    """
    global _active
    _hook_tracer()
    with _state.lock:
        _state.depth += 1
        if _state.depth > 1:
            return
        _state.fastpath = torch.backends.mha.get_fastpath_enabled()
        _state.overrides = library.Library("aten", "IMPL")
        try:
            for key in _KEYS:
                _state.overrides.impl("scaled_dot_product_attention", _route, key)
        except BaseException:
            _state.overrides._destroy()
            _state.overrides, _state.depth = None, 0
            raise
        torch.backends.mha.set_fastpath_enabled(False)
        _forget_resolved_kernels()
        _active = compat.routed = True


def disable() -> None:
    """Undo one `enable()`; without one, nothing happens."""
    global _active
    with _state.lock:
        if _state.depth == 0:
            return
        _state.depth -= 1
        if _state.depth > 0:
            return
        _active = compat.routed = False
        if _state.overrides is not None:
            _state.retired.append([library.get_kernel(_operator, key) for key in _KEYS])
            _state.overrides._destroy()
            _state.overrides = None
            _forget_resolved_kernels()
        torch.backends.mha.set_fastpath_enabled(_state.fastpath)


def is_enabled() -> bool:
    """Whether torch's function comes to Orchard now."""
    return _active


@contextmanager
def enabled() -> Iterator[None]:
    """`with orchard.enabled():` enables for the block, in every thread of the process."""
    enable()
    try:
        yield
    finally:
        disable()


def _route(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The operator's kernel while enabled."""
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    reason = _TRANSFORMED if _is_transformed() else why_torch(*call)
    if reason is None:
        if not is_traced(query):
            journal.intercepted()
        return serve(*call[:7])
    if not is_traced(query) or isinstance(query, FakeTensor):  # once for each trace
        journal.delegated(reason)
    return _operator.decompose(*call[:6], scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]


_TRANSFORMED = Reason("transform", "the call is under a torch.func transform or forward-mode AD")


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _forget_resolved_kernels() -> None:
    """torch's tracing remembers which kernel serves an operator, and Library does not tell it."""
    getattr(_operator, "_dispatch_cache", {}).clear()


def _is_active() -> bool:
    return _active


def _hook_tracer() -> None:
    """Teach torch.compile's tracer to see Orchard's call, once per process.

    torch offers no public way to replace one of its own functions in a trace. What was compiled
    before cannot know of Orchard, so it is dropped; later changes are seen by the guard on
    `_active` that inlining `_is_active` leaves.
    """
    if _state.tracer_hooked:
        return
    try:
        import torch._dynamo
        from torch._dynamo.variables.functions import UserFunctionVariable
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        handlers = TorchInGraphFunctionVariable._get_handlers()

        def inline_while_active(function: Any, guard: Any = _is_active) -> Any:
            def handle(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
                if tx.f_code is scaled_dot_product_attention.__code__:
                    return None  # Orchard leaves this call to torch
                active = tx.inline_user_function_return(UserFunctionVariable(guard), [], {})
                if not active.as_python_constant():
                    return None  # torch's own handling
                return tx.inline_user_function_return(
                    UserFunctionVariable(function), list(args), kwargs
                )

            return handle

        attention = inline_while_active(scaled_dot_product_attention)
        handlers[F.scaled_dot_product_attention] = attention
        handlers[torch.ops.aten.scaled_dot_product_attention] = attention
        handlers[_operator] = attention
        # The tracer takes this function whole, with the attention inside it.
        handlers[F.multi_head_attention_forward] = inline_while_active(
            F.multi_head_attention_forward
        )
        torch._dynamo.reset()
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"orchard: torch.compile of this torch cannot be routed ({error}); compiled code "
            "keeps torch's attention",
            IntegrationWarning,
            stacklevel=3,
        )
    _state.tracer_hooked = True
