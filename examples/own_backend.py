"""A backend in one class: what it serves is a table, what it does not it says by itself."""

from __future__ import annotations

import torch

import orchard
from orchard.attention import reference
from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.backends import load
from orchard.dispatch.backend import Backend, Capability
from orchard.dispatch.journal import Journal
from orchard.dispatch.planner import Planner
from orchard.dispatch.settings import Settings


class TwoByTwo(Backend):
    name = "two-by-two"
    summary = "an example that takes head dimensions that are even"
    capabilities = (
        Capability(
            kernel="example",
            devices=("cpu",),
            dtypes=(torch.float32,),
            head_dim_multiple=2,
            bands=("causal",),
            lse=True,
            strided_grad_out=True,
            unaligned_rows=True,
        ),
    )

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        return reference.forward(tensors, problem.options)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        return reference.backward(tensors, problem.options, upstream)


def main() -> None:
    planner = Planner((TwoByTwo(), *load()), Settings(), Journal())  # in order of preference
    query = torch.randn(1, 2, 16, 8)
    causal = orchard.explain(query, query, query, causal=True).problem
    capped = orchard.explain(query, query, query, softcap=30.0, window=(4, 4)).problem
    print(planner.explain(causal), end="\n\n")
    print(planner.explain(capped))


if __name__ == "__main__":
    main()
