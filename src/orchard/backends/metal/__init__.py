"""Orchard's own Metal kernels, launched through torch.mps.compile_shader."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from orchard.attention.problem import (
    Gradients,
    Options,
    Problem,
    Saved,
    Tensors,
    Upstream,
    default_scale,
)
from orchard.attention.reference import attend
from orchard.backends.metal.launch import (
    BackwardKind,
    forward_kernels,
    is_empty,
    plan_backward,
    plan_forward,
    run_backward,
    run_forward,
)
from orchard.backends.metal.quantized import (
    StoredOperands,
    describe_stored,
    plan_stored,
    run_stored,
)
from orchard.backends.metal.runtime import MetalRuntime, TorchRuntime
from orchard.backends.metal.source import MASK_TYPES, TYPES, Library, MetalCompileError
from orchard.backends.metal.stored_probe import probe_case
from orchard.dispatch.backend import Backend, Capability, Reason, near
from orchard.dispatch.known import Known
from orchard.text import one_line

_STORED = "stored"  # the kernels on operands in few bits, which have a probe of their own


def capability(device: str) -> Capability:
    """What the kernels serve, on whatever stands for the device."""
    return Capability.everything(
        "simdgroup",
        (device,),
        tuple(TYPES),
        max_head_dim=256,
        mask_dtypes=tuple(MASK_TYPES),
        size_limit=2**31 - 1024,  # the end of a tile or run past the last is a number too
    )


class MetalBackend(Backend):
    name = "metal"
    summary = "Orchard's own Metal kernels, for Apple GPUs"
    capabilities = (capability("mps"),)
    probe_rows = (1, 16)

    def __init__(self, runtime: MetalRuntime | None = None) -> None:
        super().__init__()
        self.runtime: MetalRuntime = runtime or TorchRuntime()
        self.shaders = Library(self.runtime)
        self._forwards = Known(plan_forward)
        self._backwards = Known(plan_backward)
        self._stored = Known(plan_stored)

    def special_reasons(self, capability: Capability, problem: Problem) -> tuple[Reason, ...]:
        fp32, softcap = torch.finfo(torch.float32), problem.options.softcap
        if softcap and not fp32.tiny <= softcap <= fp32.max * math.log(2):
            sentence = "takes no softcap that fp32 does not hold, also in units of log 2"
            return (Reason("softcap", sentence, "use a softcap nearer to the scores"),)
        return ()

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        with self.runtime.lock:
            return run_forward(self.shaders, problem, self._forwards[problem], tensors)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        by_lse = None if upstream.lse is None else upstream.lse.stride()
        kind = BackwardKind(problem, saved.out.stride(), saved.lse.stride(), by_lse)
        with self.runtime.lock:
            plan = self._backwards[kind]
            return run_backward(self.shaders, problem, plan, tensors, saved, upstream)

    def _is_right(self, capability: Capability, device: torch.device, rows: int) -> bool:
        if capability.kernel != _STORED:
            return super()._is_right(capability, device, rows)
        operands, exact = probe_case(rows, device)
        options = Options(default_scale(exact.query.shape[3]))
        saved = self.forward_stored(operands, None, None, options)
        return all(map(near, saved, attend(exact, options)))

    def stored_reasons(
        self, operands: StoredOperands, mask: Tensor | None, options: Options
    ) -> tuple[Reason, ...]:
        """Why `forward_stored` cannot serve what `forward` serves."""
        stored = describe_stored(operands, mask, options)
        if is_empty(stored.problem):
            return ()
        kernel = replace(self.capabilities[0], kernel=_STORED)
        unavailable = self.unavailable(kernel, stored.problem.device)
        if unavailable is not None:
            return (unavailable,)
        try:
            with self.runtime.lock:
                forward_kernels(self.shaders, self._stored[stored])
        except MetalCompileError as error:
            return (Reason("failed", f"its kernel does not compile: {one_line(error)}"),)
        return ()

    def forward_stored(
        self, operands: StoredOperands, mask: Tensor | None, seed: Tensor | None, options: Options
    ) -> Saved:
        """(out, lse) of attention at the values that the operands stand for, in fp32."""
        stored = describe_stored(operands, mask, options)
        with self.runtime.lock:
            plan = self._stored[stored]
            return run_stored(self.shaders, stored, plan, operands, mask, seed)
