"""In which blocks a kernel works: what the tables say, and no search at run time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from orchard.attention.problem import Problem
from orchard.backends.cuda import configs
from orchard.backends.cuda.configs import Config, Entry, Role
from orchard.backends.cuda.runtime import Gpu

_SPLIT_BLOCKS = 4  # blocks of keys of a split at least: below, joining costs more than it gains
_MOST_SPLITS = 128
_RESIDENT = 2  # programs of a decode that run on a multiprocessor at once
_GOOD_ENOUGH = 0.9  # of the best share of busy multiprocessors


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
    found = (trials or {}).get(role) or _known(entry_of(problem, role), gpu.family)
    if role == "decode":
        found = found._replace(rows=head_block(group(problem) * problem.query_length))
    return found


def _known(entry: Entry, family: str) -> Config:
    shipped = configs.shipped()
    for table, name in ((configs.of_the_user(), family), (shipped, family), (shipped, "default")):
        found = configs.lookup(table, name, entry)
        if found is not None:
            return found
    raise AssertionError(f"the shipped table has no {entry}")


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
