"""Every part of quantised operands and every output against a forbidden page, on either side.

Prints each case before it runs, so that a crash can be told from its output.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from orchard.backends.cpu import native, quantized
from orchard.quantization import QuantizationConfig, cpu, explain
from orchard.testing.guard_pages import SIDES, Side, guarded_outputs, moved
from orchard.testing.inputs import Guarded

SIZES = ((1, 90), (3, 40), (37, 150))
DIMS = ((1, 3), (40, 24), (41, 37), (64, 80), (128, 128), (256, 64), (8, 256))
CONFIGS = (
    QuantizationConfig(symmetric=False),
    QuantizationConfig("int4", "int4", "int4"),
)


def check(given: list[Tensor], config: QuantizationConfig, side: Side) -> list[str]:
    """What is wrong when everything lies against pages on one side."""
    call = explain(*given, config=config).call
    expected, expected_lse = cpu.serve(call._replace(return_lse=True))
    guards: list[Guarded] = []

    def move(tensor: Tensor) -> Tensor:
        guards.append(moved(tensor, side))
        return guards[-1].tensor

    operands = [
        operand._replace(
            stored=replace(
                operand.stored, **{name: move(part) for name, part in operand.stored.parts.items()}
            )
        )
        for operand in call[:3]
    ]
    with guarded_outputs(side) as outputs:
        out, lse = cpu.serve(
            call._replace(**dict(zip(call._fields, operands, strict=False)), return_lse=True)
        )
    wrong = []
    if not torch.equal(out, expected) or lse is None or not torch.equal(lse, expected_lse):
        wrong.append("results depend on where things lie")
    form = call.key.stored.format
    for tensor, mean in ((given[1], call.key.stored.mean), (given[2], None)):
        library, group = native.loaded(), form.group(tensor.shape)
        again = quantized.quantize(
            library,
            move(tensor),
            None if mean is None else move(mean),
            group,
            int4=form.precision == "int4",
            symmetric=form.symmetric,
        )
        stored = (call.key if mean is not None else call.value).stored
        if again is None or not torch.equal(again.data, stored.data):
            wrong.append("levels depend on where things lie")
    if not all(guard.intact() for guard in (*guards, *outputs)) or len(outputs) < 2:
        wrong.append("memory around an operand or an output was written to")
    return wrong


def main() -> int:
    failed = False
    for (rows, keys), (dim, value_dim), config in product(SIZES, DIMS, CONFIGS):
        shapes = (1, 2, rows, dim), (1, 1, keys, dim), (1, 1, keys, value_dim)
        given = [torch.randn(shape) for shape in shapes]
        for side in SIDES:
            case = f"{config.key_precision}, {rows} rows, {keys} keys, {dim} and {value_dim}"
            print(f"{case}, guarded at its {side}", flush=True)
            for complaint in check(given, config, side):
                print(f"{case}, guarded at its {side}: {complaint}", file=sys.stderr)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
