"""The Triton kernels of the cuda backend, executed on the CPU by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

Run = Callable[..., subprocess.CompletedProcess[str]]
TILED = {
    "general_forward.attention_forward",
    "general_backward.attention_rows",
    "general_backward.attention_grad_key_value",
    "general_backward.attention_grad_query",
}

# Groups of cases that share a process, for Triton interprets either all kernels of one or none,
# and the kernels that they are to have run.
PROCESSES = (
    (("shapes", "packed"), TILED),
    (("masks", "empty rows"), TILED | {"general_backward.attention_grad_mask"}),
    (
        ("decodes", "large masks", "interchange"),
        TILED | {"decode.attention_splits", "decode.attention_join"},
    ),
)


@pytest.mark.grad
@pytest.mark.parametrize(
    ("groups", "kernels"), PROCESSES, ids=[" and ".join(g) for g, _ in PROCESSES]
)
def test_interpreted_kernels(groups: tuple[str, ...], kernels: set[str], run_program: Run) -> None:
    """Values and gradients within budget, guards intact, dropout's bits those of the definition."""
    done = run_program("interpreted_kernels", *groups)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert set(printed["kernels"]) == kernels
    assert tuple(printed["found"]) == groups
    for group in groups:
        cases = printed["found"][group]
        assert cases
        assert {name: said for name, said in cases.items() if said} == {}


def test_around_the_hopper_backward(run_program: Run) -> None:
    """Statistics of rows, all the memory that is to be 0, and rows of dQ that are left to do."""
    done = run_program("interpreted_hopper")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 6
    assert {name: said for name, said in found.items() if said} == {}
