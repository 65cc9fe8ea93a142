"""Orchard's own kernels for the CPU: a C++ library behind a plain C ABI, loaded when needed."""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.attention import memory
from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.backends.cpu import native
from orchard.backends.cpu.arguments import (
    BackwardKind,
    BackwardTemplate,
    ForwardTemplate,
    Place,
    backward_template,
    forward_template,
    kind_of,
    last_word,
    word,
)
from orchard.backends.cpu.native import BackwardArgs, ForwardArgs
from orchard.dispatch import settings
from orchard.dispatch.backend import Backend, Capability, Reason, dtype_name
from orchard.errors import ArgumentTypeError

_KNOWN_CALLS = 4096
_SIZE_LIMIT = 2**31
_NO_LSE = torch.empty(0)  # stands for an lse that was not asked for; nobody writes to it

# Both structs begin alike, so these words are those of either.
_QUERY, _KEY, _VALUE, _MASK, _OUT, _LSE = (
    word(ForwardArgs, name) for name in ("query", "key", "value", "mask", "out", "lse")
)
_GRAD_OUT, _GRAD_LSE, _GRAD_QUERY, _GRAD_KEY, _GRAD_VALUE, _GRAD_MASK = (
    word(BackwardArgs, f"grad_{name}") for name in ("out", "lse", "query", "key", "value", "mask")
)
_FORWARD_SEED, _BACKWARD_SEED = word(ForwardArgs, "seed"), word(BackwardArgs, "seed")


class CpuBackend(Backend):
    name = "cpu"
    summary = "Orchard's own kernels in C++, for the best instruction set of this machine"
    capabilities = (
        Capability(
            kernel="native",
            devices=("cpu",),
            dtypes=(torch.float32, torch.float16, torch.bfloat16),
            max_head_dim=512,
            other_value_dim=True,
            grouped_heads=True,
            masks=("bool", "additive"),
            mask_grad=True,
            bands=("causal", "bottom_right", "window"),
            mask_with_band=True,
            softcap=True,
            dropout=True,
            lse=True,
            lse_grad=True,
            zero_sizes=True,
            strided_last_axis=True,
            strided_grad_out=True,
            unaligned_rows=True,
            deterministic=True,
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._library: native.Library | None = None
        self._forwards: dict[Problem, ForwardTemplate] = {}
        self._backwards: dict[BackwardKind, BackwardTemplate] = {}

    def special_reasons(self, capability: Capability, problem: Problem) -> tuple[Reason, ...]:
        found: list[Reason] = []
        mask = problem.mask
        if mask is not None and mask.dtype not in native.DTYPES:
            sentence = f"takes no mask of {dtype_name(mask.dtype)}"
            found.append(Reason("mask_dtype", sentence, "convert the mask to float32"))
        fp32, (scale, softcap) = torch.finfo(torch.float32), problem.options[:2]
        if softcap and (softcap < fp32.tiny or abs(scale) / softcap > fp32.max):
            sentence = "takes no softcap so small that fp32 does not hold it, or scale / softcap"
            found.append(Reason("softcap", sentence, "drop softcap"))
        sizes = (*problem.query_shape, *problem.key_shape, *problem.value_shape)
        if max(sizes) >= _SIZE_LIMIT or problem.batch * problem.heads >= _SIZE_LIMIT:
            found.append(Reason("size", "counts rows, keys and heads in 31 bits"))
        return tuple(found)

    def probe(self, capability: Capability, device: torch.device) -> Reason | None:
        try:
            self._open()
        except native.UnavailableError as error:
            return error.reason
        return super().probe(capability, device)

    def _open(self) -> native.Library:
        library = native.use_isa(settings.current().cpu_isa)
        # With a budget of its own Orchard has threads of its own.
        library.share_threads(
            native.torch_team() if settings.current().num_threads is None else None
        )
        self._library = library
        return library

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        library = self._library or self._open()
        template = self._forwards.get(problem) or self._new_forward(problem)
        query, key, value, mask, seed = tensors
        _check_operands(problem, key, value, mask)
        out = _allocate(template.out, query)
        words = template.words[:]
        words[_QUERY] = query.data_ptr()
        words[_KEY] = key.data_ptr()
        words[_VALUE] = value.data_ptr()
        words[_OUT] = out.data_ptr()
        lse = _NO_LSE
        if template.lse is not None:
            lse = _allocate(template.lse, query, torch.float32)
            words[_LSE] = lse.data_ptr()
        if mask is not None:
            words[_MASK] = mask.data_ptr()
        if seed is not None:
            seed = _checked_seed(seed)
            words[_FORWARD_SEED] = seed.data_ptr()
        words[-1] = last_word(problem.options.threshold, _threads())
        status = library.forward(words.buffer_info()[0])
        if status:
            library.fail(status)
        return Saved(out, lse)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        library = self._library or self._open()
        query, key, value, mask, seed = tensors
        out, lse = saved
        grad_out, grad_lse = upstream
        _check_operands(problem, key, value, mask, out, lse, grad_out, grad_lse)
        kind = BackwardKind(
            problem,
            kind_of(out),
            kind_of(lse),
            kind_of(grad_out),
            None if grad_lse is None else kind_of(grad_lse),
        )
        template = self._backwards.get(kind) or self._new_backward(kind)
        words = template.words[:]
        words[_QUERY] = query.data_ptr()
        words[_KEY] = key.data_ptr()
        words[_VALUE] = value.data_ptr()
        words[_OUT] = out.data_ptr()
        words[_LSE] = lse.data_ptr()
        words[_GRAD_OUT] = grad_out.data_ptr()
        if grad_lse is not None:
            words[_GRAD_LSE] = grad_lse.data_ptr()
        grads = (
            _allocate(template.grad_query, query),
            _allocate(template.grad_key, query),
            _allocate(template.grad_value, query),
        )
        words[_GRAD_QUERY] = grads[0].data_ptr()
        words[_GRAD_KEY] = grads[1].data_ptr()
        words[_GRAD_VALUE] = grads[2].data_ptr()
        grad_mask = None
        if mask is not None:
            words[_MASK] = mask.data_ptr()
            if template.grad_mask is not None:
                grad_mask = _allocate(template.grad_mask, mask, template.mask_dtype)
                words[_GRAD_MASK] = grad_mask.data_ptr()
        if seed is not None:
            seed = _checked_seed(seed)
            words[_BACKWARD_SEED] = seed.data_ptr()
        words[-1] = last_word(problem.options.threshold, _threads())
        status = library.backward(words.buffer_info()[0])
        if status:
            library.fail(status)
        if mask is not None and grad_mask is not None:
            grad_mask = grad_mask.to(mask.dtype)
        return Gradients(*grads, grad_mask)

    def _new_forward(self, problem: Problem) -> ForwardTemplate:
        if len(self._forwards) >= _KNOWN_CALLS:
            self._forwards.clear()
        template = self._forwards[problem] = forward_template(problem)
        return template

    def _new_backward(self, kind: BackwardKind) -> BackwardTemplate:
        if len(self._backwards) >= _KNOWN_CALLS:
            self._backwards.clear()
        template = self._backwards[kind] = backward_template(kind)
        return template


def _check_operands(problem: Problem, key: Tensor, value: Tensor, *more: Tensor | None) -> None:
    """What the problem does not say; only a caller of the operator itself can get it wrong."""
    dtype = problem.dtype
    if key.dtype is not dtype or value.dtype is not dtype:
        raise ArgumentTypeError(
            f"key and value are {key.dtype} and {value.dtype}; they must be query's {dtype}"
        )
    for tensor in (key, value, *more):
        if tensor is not None and not tensor.is_cpu:
            raise ArgumentTypeError(f"an operand is on {tensor.device}; all must be on cpu")


def _checked_seed(seed: Tensor) -> Tensor:
    if seed.dtype is not torch.int32 or seed.numel() != 2 or not seed.is_cpu:
        raise ArgumentTypeError("seed must be two int32 words on the CPU")
    return seed.contiguous()


def _allocate(place: Place, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return memory.allocate(
        place.shape, place.strides, dtype=dtype or like.dtype, device=like.device
    )


def _threads() -> int:
    return min(settings.current().num_threads or torch.get_num_threads(), native.MOST_THREADS)
