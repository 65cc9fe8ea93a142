"""Orchard's own kernels for the CPU: a C++ library behind a plain C ABI, loaded when needed."""

from __future__ import annotations

import torch

from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.backends.cpu import native
from orchard.backends.cpu.arguments import (
    BackwardKind,
    backward_template,
    forward_template,
    last_word,
    word,
)
from orchard.backends.cpu.native import BackwardArgs, ForwardArgs
from orchard.dispatch import settings
from orchard.dispatch.backend import Backend, Capability, Reason
from orchard.dispatch.known import Known

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
        Capability.everything(
            "native",
            ("cpu",),
            (torch.float32, torch.float16, torch.bfloat16),
            max_head_dim=512,
            mask_dtypes=tuple(native.DTYPES),
            size_limit=2**31,
        ),
    )
    probe_rows = (1, 16)

    def __init__(self) -> None:
        super().__init__()
        self._library: native.Library | None = None
        self._forwards = Known(forward_template)
        self._backwards = Known(backward_template)

    def special_reasons(self, capability: Capability, problem: Problem) -> tuple[Reason, ...]:
        fp32, (scale, softcap) = torch.finfo(torch.float32), problem.options[:2]
        if softcap and (softcap < fp32.tiny or abs(scale) / softcap > fp32.max):
            sentence = "takes no softcap so small that fp32 does not hold it, or scale / softcap"
            return (Reason("softcap", sentence, "drop softcap"),)
        return ()

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
        template = self._forwards[problem]
        query, key, value, mask, seed = tensors
        out = template.out.allocate(problem.device)
        words = template.words[:]
        words[_QUERY] = query.data_ptr()
        words[_KEY] = key.data_ptr()
        words[_VALUE] = value.data_ptr()
        words[_OUT] = out.data_ptr()
        lse = _NO_LSE
        if template.lse is not None:
            lse = template.lse.allocate(problem.device)
            words[_LSE] = lse.data_ptr()
        if mask is not None:
            words[_MASK] = mask.data_ptr()
        if seed is not None:
            words[_FORWARD_SEED] = seed.data_ptr()
        words[-1] = last_word(problem.options.threshold, native.threads())
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
        by_lse = None if grad_lse is None else grad_lse.stride()
        template = self._backwards[BackwardKind(problem, out.stride(), lse.stride(), by_lse)]
        words = template.words[:]
        words[_QUERY] = query.data_ptr()
        words[_KEY] = key.data_ptr()
        words[_VALUE] = value.data_ptr()
        words[_OUT] = out.data_ptr()
        words[_LSE] = lse.data_ptr()
        words[_GRAD_OUT] = grad_out.data_ptr()
        if grad_lse is not None:
            words[_GRAD_LSE] = grad_lse.data_ptr()
        device = problem.device
        grads = (
            template.grad_query.allocate(device),
            template.grad_key.allocate(device),
            template.grad_value.allocate(device),
        )
        words[_GRAD_QUERY] = grads[0].data_ptr()
        words[_GRAD_KEY] = grads[1].data_ptr()
        words[_GRAD_VALUE] = grads[2].data_ptr()
        grad_mask = None
        if mask is not None:
            words[_MASK] = mask.data_ptr()
            if template.grad_mask is not None:
                grad_mask = template.grad_mask.allocate(device)
                words[_GRAD_MASK] = grad_mask.data_ptr()
        if seed is not None:
            words[_BACKWARD_SEED] = seed.data_ptr()
        words[-1] = last_word(problem.options.threshold, native.threads())
        status = library.backward(words.buffer_info()[0])
        if status:
            library.fail(status)
        if mask is not None and grad_mask is not None:
            grad_mask = grad_mask.to(mask.dtype)
        return Gradients(*grads, grad_mask)
