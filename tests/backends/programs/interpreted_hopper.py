"""Run what comes before and after the Hopper backward, interpreted; print what is wrong as JSON."""

from __future__ import annotations

import json

import torch
from programs import triton_interpreter  # corrects the interpreter

from orchard.backends.cuda.hopper_around import grad_query_kernel, statistics_kernel

assert triton_interpreter
PLANES, HEADS, ROWS, PADDED, DIM, BLOCK, SPAN = 4, 2, 100, 128, 64, 64, 32
NAN = float("nan")


def drawn(*shape: int) -> torch.Tensor:
    """Small integers: their products and sums are exact."""
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-9, 10, shape, generator=source).float()


def statistics(further: int) -> list[str]:
    """Poisoned memory, of which `further` elements are to be cleared beside the sums."""
    out, grad_out = drawn(2, HEADS, ROWS, DIM), drawn(2, ROWS, HEADS, DIM).transpose(1, 2)
    lse = drawn(2, HEADS, ROWS)
    lse[0, 1, 7] = -torch.inf
    scaled, delta = (torch.full((PLANES, PADDED), NAN) for _ in range(2))
    memory = torch.full((PLANES * ROWS * DIM + further + 8,), NAN)
    sums = memory[: PLANES * ROWS * DIM]
    statistics_kernel[PLANES * PADDED // BLOCK,](
        *(out, grad_out, lse, lse, scaled, delta, memory, memory[sums.numel() :]),
        *(ROWS, PADDED, HEADS, DIM, DIM, further),
        *(*out.stride()[:3], *grad_out.stride()[:3], *lse.stride(), *lse.stride()),
        HEAD_TILE=DIM,
        BLOCK=BLOCK,
        GRAD_LSE=False,
        SUMS=True,
        EARLY=False,
    )
    empty = lse == -torch.inf
    wrong = []
    expected = torch.full((2, HEADS, PADDED), torch.inf)
    expected[..., :ROWS] = torch.where(empty, torch.inf, lse * 1.4426950408889634)
    if not torch.equal(scaled.view_as(expected), expected):
        wrong.append("lse")
    products = torch.zeros(2, HEADS, PADDED)
    products[..., :ROWS] = (out * grad_out).sum(-1).masked_fill(empty, 0.0)
    if not torch.equal(delta.view_as(products), products):
        wrong.append("delta")
    cleared = memory[: sums.numel() + further]
    if bool((cleared != 0).any()):
        wrong.append(f"{int((cleared != 0).sum())} of {cleared.numel()} elements not cleared")
    if not bool(memory[sums.numel() + further :].isnan().all()):
        wrong.append("cleared too much")
    return wrong


def grad_query(taken: list[int]) -> list[str]:
    """Rows of each plane that are converted already are left as they are."""
    sums = drawn(PLANES, ROWS, DIM)
    result = torch.full((2, ROWS, HEADS, DIM), 77.0).transpose(1, 2)
    spans = torch.tensor(taken, dtype=torch.int32)
    grad_query_kernel[PLANES * -(-ROWS // BLOCK),](
        *(sums, spans, result, ROWS, HEADS, DIM, 0.5),
        *result.stride()[:3],
        HEAD_TILE=DIM,
        BLOCK=BLOCK,
        SPAN=SPAN,
        EARLY=False,
    )
    expected = (sums * 0.5).view(2, HEADS, ROWS, DIM)
    for plane, count in enumerate(taken):
        expected[plane // HEADS, plane % HEADS, : count * SPAN] = 77.0
    return [] if torch.equal(result, expected) else ["dQ"]


def main() -> None:
    grid = PLANES * PADDED * DIM  # elements that all programs clear in one round
    found = {f"further {n}": statistics(n) for n in (0, 9, grid - 1, grid + 1, 3 * grid + 5)}
    found["taken"] = grad_query([0, 1, 3, 9])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
