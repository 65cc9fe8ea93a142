"""Whether anything of torch's would see, or has a part in, a call of an operator."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _are_functorch_transforms_active,
    _dispatch_keys,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)
from torch.autograd import profiler
from torch.overrides import has_torch_function


def _ordinary_keys() -> int:
    kinds = [f"{part}{kind}" for part in ("", "Autograd", "Autocast") for kind in _DEVICES]
    sets = (DispatchKeySet(getattr(DispatchKey, name)) for name in ("ADInplaceOrView", *kinds))
    return functools.reduce(operator.or_, sets).raw_repr()


_DEVICES = ("CPU", "CUDA", "MPS")
_EXTRAORDINARY = ~_ordinary_keys()  # of wrappers, stand-ins, sparse tensors, negated views, ...


def is_observed(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a mode, transform, tracer or profiler is there, or an operand that needs one.

    Where none is, calling an operator and calling our kernel of it come to the same. What cannot be
    seen from here: kernels that others have registered, observers other than torch.profiler's.
    """
    if (
        has_torch_function(tensors)
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or _get_tracing_state() is not None
        or profiler._is_profiler_enabled
    ):
        return True
    keys = 0
    for tensor in tensors:
        if tensor is not None:
            keys |= _dispatch_keys(tensor).raw_repr()
    return keys & _EXTRAORDINARY != 0
