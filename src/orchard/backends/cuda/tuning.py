"""In which blocks a kernel works: what the tables say, and no search at run time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from orchard.attention.problem import Problem
from orchard.backends.cuda import configs
from orchard.backends.cuda.configs import Config, Entry, Role
from orchard.backends.cuda.runtime import Gpu
from orchard.dispatch.backend import rows_aligned

_SPLIT_BLOCKS = 4  # blocks of keys of a split at least: below, joining costs more than it gains
_MOST_SPLITS = 128
_MOST_RESIDENT = 2  # programs of a decode that run on a multiprocessor at once
_GOOD_ENOUGH = 0.9  # of the best share of busy multiprocessors

_WEIGHTED: tuple[Role, ...] = ("forward", "decode", "grad_key_value", "grad_query")
_LEAST_DEPTH = 32  # of products of weights that are chosen twice
_LEAST_BLOCK = 16  # rows or keys that a product has at least
_USUAL_KEYS = 64  # of a decode's block; wide ones have more
_WIDE_ROWS = 16  # of a decode's block at most, where that of keys is wide
_WIDE_SHARE = 1024  # keys of a multiprocessor at least, likewise: fewer are not shared evenly


def blocks(length: int, size: int) -> int:
    return -(-length // size)


def head_block(size: int) -> int:
    """A head dimension as a kernel holds it."""
    return max(16, 1 << (size - 1).bit_length()) if size else 16


def entry_of(problem: Problem, role: Role) -> Entry:
    widest = head_block(max(problem.head_dim, problem.value_dim))
    return Entry(role, "single" if problem.dtype == torch.float32 else "half", str(widest))


def config(
    problem: Problem, gpu: Gpu, role: Role, trials: Mapping[Role, Config] | None = None
) -> Config:
    """What was tuned for the GPU's family, by the user or by us, else what every family runs.

    `trials` go before any table.
    """
    entry = entry_of(problem, role)
    found = (trials or {}).get(role) or configs.lookup(configs.of_the_user(), gpu.family, entry)
    if found is None:
        found = _shipped(entry, gpu.family)
        if role == "decode" and not _suits_wide_blocks(problem, gpu):
            found = found._replace(keys=min(found.keys, _USUAL_KEYS))
    found = _deepened(found, problem, role)
    if role == "decode":
        found = found._replace(rows=_packed_rows(problem))
    return found


def chosen_twice(problem: Problem) -> bool:
    """Whether weights are chosen by a bool mask and by dropout.

    Triton 3.6 then lays out the operands of their products in runs of 8, four to a row (kWidth 8).
    Where tensor cores multiplied less than 32 deep, the answers were wrong on an H200.
    """
    mask = problem.mask
    return mask is not None and mask.kind == "bool" and problem.options.threshold != 0


def _deepened(config: Config, problem: Problem, role: Role) -> Config:
    """This, or blocks that multiply weights 32 deep, where that is needed."""
    exact = problem.dtype == torch.float32 and config.precision == "ieee"
    if exact or role not in _WEIGHTED or not chosen_twice(problem):
        return config
    rows, keys = config.rows, config.keys
    if role == "grad_key_value":
        larger = max(1, _LEAST_DEPTH // rows)
        return config._replace(rows=rows * larger, keys=max(_LEAST_BLOCK, keys // larger))
    larger = max(1, _LEAST_DEPTH // keys)
    return config._replace(rows=max(_LEAST_BLOCK, rows // larger), keys=keys * larger)


def _shipped(entry: Entry, family: str) -> Config:
    for name in (family, "default"):
        found = configs.lookup(configs.shipped(), name, entry)
        if found is not None:
            return found
    raise AssertionError(f"the shipped table has no {entry}")


def _suits_wide_blocks(problem: Problem, gpu: Gpu) -> bool:
    """Whether a decode is like those that wide blocks of keys were tuned on.

    With masks or more rows they do not fit into shared memory; with bands, dropout or rows that
    cannot be copied in runs of 16 bytes they spill registers.
    """
    options, keys = problem.options, problem.key_length * problem.batch * problem.kv_heads
    plain = problem.mask is None and options.band is None and not options.threshold
    in_runs = rows_aligned(problem) and problem.key_strides[3] == problem.value_strides[3] == 1
    few_rows = _packed_rows(problem) <= _WIDE_ROWS
    return plain and in_runs and few_rows and keys >= _WIDE_SHARE * gpu.processors


def _packed_rows(problem: Problem) -> int:
    """Rows of a decode's block: those of all query heads of a key head."""
    return head_block(group(problem) * problem.query_length)


def group(problem: Problem) -> int:
    """Query heads that share a key head."""
    return problem.heads // max(1, problem.kv_heads)


def splits(problem: Problem, gpu: Gpu, config: Config) -> int:
    """Into how many parts the keys of a decode are split: the fewest that keep the GPU busy."""
    others = max(1, problem.batch * problem.kv_heads)
    places = _resident(problem, gpu, config) * gpu.processors
    most = max(1, min(_MOST_SPLITS, blocks(problem.key_length, config.keys) // _SPLIT_BLOCKS))
    busy = [others * n / (blocks(others * n, places) * places) for n in range(1, most + 1)]
    wanted = _GOOD_ENOUGH * max(busy)
    return 1 + next(n for n, share in enumerate(busy) if share >= wanted)


def _resident(problem: Problem, gpu: Gpu, config: Config) -> int:
    """Programs of a decode that run on a multiprocessor at once: as many as its shared memory has
    room for the keys and values that they have on the way."""
    columns = head_block(problem.head_dim) + head_block(problem.value_dim)
    block = config.keys * columns * problem.dtype.itemsize
    on_the_way = max(1, config.stages - 1) * block  # the last stage is computed with
    return max(1, min(_MOST_RESIDENT, gpu.shared_memory // on_the_way))
