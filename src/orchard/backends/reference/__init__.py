"""The readable definition as a backend: serves everything, on any device."""

from __future__ import annotations

import torch

from orchard.attention import reference
from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.dispatch.backend import ANY_DEVICE, Backend, Capability


class ReferenceBackend(Backend):
    name = "reference"
    summary = "the readable definition in torch operations, chunked; also fp64 and second gradients"
    capabilities = (
        Capability.everything(
            "chunked",
            ANY_DEVICE,
            (torch.float32, torch.float16, torch.bfloat16, torch.float64),
            stages=("forward", "backward", "double_backward"),
        ),
    )

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        return reference.forward(tensors, problem.options)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        return reference.backward(tensors, problem.options, upstream, mask_grad=problem.mask_grad)

    def double_backward(
        self, problem: Problem, tensors: Tensors, upstream: Upstream, directions: Gradients
    ) -> tuple[Upstream, Gradients]:
        return reference.double_backward(tensors, problem.options, upstream, directions)
