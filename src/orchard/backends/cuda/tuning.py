"""In which blocks a kernel works: a shipped table, and no search at run time."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import torch

from orchard.attention.problem import Problem
from orchard.backends.cuda.runtime import Gpu

Role = Literal["forward", "decode", "join", "rows", "grad_key_value", "grad_query", "grad_mask"]

_SPLIT_BLOCKS = 4  # blocks of keys of a split at least: below, joining costs more than it gains
_MOST_SPLITS = 128
_RESIDENT = 2  # programs of a decode that run on a multiprocessor at once
_GOOD_ENOUGH = 0.9  # of the best share of busy multiprocessors

Table = dict[str, dict[str, dict[str, dict[str, list[Any]]]]]


class Config(NamedTuple):
    """Blocks of rows and keys, warps of a program, stages of its pipeline.

    `precision` is how products of fp32 operands are made: "ieee", or "bf16x6", which splits each
    operand into three bf16 numbers, 24 bits in all, and adds up six products of tensor cores.
    Its blocks stay below the 64 rows of a wgmma product: ptxas 12.8 makes some such kernels read
    descriptors that nothing has written.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    precision: str = "ieee"


def blocks(length: int, size: int) -> int:
    return -(-length // size)


def head_block(size: int) -> int:
    """A head dimension as a kernel holds it."""
    return max(16, 1 << (size - 1).bit_length()) if size else 16


@cache
def _tuning() -> Table:
    """family -> kernel -> "half" or "single" -> head block -> config."""
    text = files("orchard.backends.cuda").joinpath("tuning.json").read_text()
    table: Table = json.loads(text)
    return table


def config(problem: Problem, gpu: Gpu, role: Role) -> Config:
    """That of the GPU's family where it was tuned, else one that every family runs."""
    size = "single" if problem.dtype == torch.float32 else "half"
    widest = str(head_block(max(problem.head_dim, problem.value_dim)))
    known = _tuning()
    tuned = known.get(gpu.family, {}).get(role, {}).get(size, {}).get(widest)
    found = Config(*(tuned or known["default"][role][size][widest]))
    if role == "decode":
        found = found._replace(rows=head_block(group(problem) * problem.query_length))
    return found


def group(problem: Problem) -> int:
    """Query heads that share a key head."""
    return problem.heads // max(1, problem.kv_heads)


def splits(problem: Problem, gpu: Gpu, block_keys: int) -> int:
    """Into how many parts the keys of a decode are split: the fewest that keep the GPU busy."""
    others = max(1, problem.batch * problem.kv_heads)
    places = _RESIDENT * gpu.processors
    most = max(1, min(_MOST_SPLITS, blocks(problem.key_length, block_keys) // _SPLIT_BLOCKS))
    busy = [others * n / (blocks(others * n, places) * places) for n in range(1, most + 1)]
    wanted = _GOOD_ENOUGH * max(busy)
    return 1 + next(n for n, share in enumerate(busy) if share >= wanted)
