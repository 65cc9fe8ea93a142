from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import orchard
from orchard.attention.memory import empty_following
from orchard.testing.guard_pages import SIDES, Side, guarded_outputs, moved
from orchard.testing.inputs import VIEWS, View, guarded

pytestmark = pytest.mark.layout

TOUCH = """
    import ctypes, os, sys
    import torch
    from orchard.attention.memory import empty_following
    from orchard.testing.guard_pages import SIDES, guarded_outputs, moved

    source = torch.ones(3, 5, 7, 2)

    def touch(side, what, where, how):
        if what == "output":
            with guarded_outputs(side):
                tensor = empty_following(source, source.shape)
        else:
            tensor = moved(source, side).tensor
        first = tensor.data_ptr()
        last = first + 4 * (tensor.numel() - 1)
        outside = first - 4 if side == "start" else last + 4
        for address in (first, last) if where == "inside" else (outside,):
            element = ctypes.c_float.from_address(address)
            if how == "write":
                element.value = 1.0
            assert element.value == 1.0 or how == "read"

    for side in SIDES:
        for what in ("operand", "output"):
            for where in ("inside", "outside"):
                for how in ("read", "write"):
                    child = os.fork()
                    if child == 0:
                        touch(side, what, where, how)
                        os._exit(0)
                    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    print(side, what, where, how, status, sep=",")
"""


def test_one_element_outside_is_a_crash() -> None:
    """Reading or writing next to the tensor ends a process; its first and last element do not."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TOUCH)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = [line.split(",") for line in done.stdout.splitlines()]
    assert len(found) == 16
    for side, what, where, how, status in found:
        expected = (0,) if where == "inside" else (-signal.SIGSEGV, -signal.SIGBUS)
        assert int(status) in expected, f"{how} {where} an {what}, {side}"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_moved_is_a_copy(view: View, dtype: torch.dtype, side: Side) -> None:
    """Same values and strides; a write beside an element shows."""
    tensor = guarded((2, 3, 4, 5), view).tensor
    copy = moved(tensor, side, dtype)
    assert torch.equal(copy.tensor, tensor.to(dtype))
    assert copy.tensor.stride() == tensor.stride()
    assert copy.intact()
    copy.buffer[0 if side == "end" else -1] = 0
    assert not copy.intact()


@pytest.mark.parametrize("side", SIDES)
def test_sizes_of_zero(side: Side) -> None:
    empty = moved(torch.empty(2, 0, 3), side)
    assert empty.tensor.shape == (2, 0, 3)
    assert empty.intact()


@pytest.mark.parametrize("side", SIDES)
def test_outputs(side: Side) -> None:
    """Outputs are the call's own, begin as NaN, and a write beside one shows."""
    query = torch.randn(1, 2, 5, 8)
    expected = orchard.attention(query, query, query, backend="reference")
    with guarded_outputs(side) as made:
        fresh = empty_following(query, (1, 2, 5, 3))
        out = orchard.attention(query, query, query, backend="reference")
    assert bool(fresh.isnan().all())
    assert torch.equal(out, expected)
    assert any(each.tensor.data_ptr() == out.data_ptr() for each in made)
    assert all(each.intact() for each in made)
    made[0].buffer[-1 if side == "end" else 0] = 0
    assert not made[0].intact()
    assert torch.equal(orchard.attention(query, query, query, backend="reference"), expected)
