"""Trees of tensors: which requests fit together, how they become one batch, and how it is split."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.serving.express import Parcel
from orchard.serving.lanes import Home

Function = Callable[..., Any]
_KINDS_REMEMBERED = 1024
_rows = attrgetter("rows")
_split_copy: Callable[..., Any] = torch.split_with_sizes_copy  # torch's stub gives it no result
_LEAF = tree_flatten(0)[1]  # the structure of a lone tensor


class OutputShapeError(ArgumentValueError):
    """The function's result cannot be told apart into the rows of its requests."""


class Batching(Protocol):
    """How requests become a batch."""

    def parcel(self, tree: Any) -> Parcel:
        """Take a request apart; what cannot be batched is refused here."""
        ...

    def run(
        self,
        function: Function,
        parcels: Sequence[Parcel],
        device: torch.device | None,
        home: Home | None = None,
    ) -> list[Any]:
        """One call for all parcels, on `device` if given; a result for each, in order, at `home` if
        given.
        """
        ...

    def positions(self, parcels: Sequence[Parcel]) -> tuple[int, int]:
        """How many positions the requests fill, and how many their batch has."""
        ...


class Kinds:
    """A number for each kind of request, so that comparing two runs no code of the caller's.

    One that was forgotten gets another: its requests then meet in two batches instead of one.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._next = count()

    def number(self, *kind: Hashable) -> int:
        if len(self._numbers) >= _KINDS_REMEMBERED:
            self._numbers.clear()
        return self._numbers.setdefault(kind, next(self._next))


class Concatenation:
    """Requests of one structure are concatenated along their first dimension."""

    def __init__(self) -> None:
        self._kinds = Kinds()

    def parcel(self, tree: Any) -> Parcel:
        if isinstance(tree, Tensor) and tree.dim() and tree.layout is torch.strided:
            shape = tree.shape
            return Parcel((tree,), _LEAF, shape[0], (shape[1:], tree.dtype, tree.device))
        leaves, spec = _flat(tree)
        rows = _leading_rows(leaves)
        group = self._kinds.number(spec, *(_kind(leaf) for leaf in leaves))
        return Parcel(tuple(leaves), spec, rows, group)

    def run(
        self,
        function: Function,
        parcels: Sequence[Parcel],
        device: torch.device | None,
        home: Home | None = None,
    ) -> list[Any]:
        columns = zip(*[parcel.leaves for parcel in parcels], strict=True)
        batch = [torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns]
        leaves, spec = _flat(function(_moved(tree_unflatten(batch, parcels[0].spec), device)))
        rows = list(map(_rows, parcels))
        _check_rows(leaves, sum(rows))
        return _dealt(leaves, spec, rows, home=home)

    def positions(self, parcels: Sequence[Parcel]) -> tuple[int, int]:
        rows = sum(map(_rows, parcels))
        return rows, rows


class Padding:
    """Dimension 1 may differ: it is filled up with zeros, and the function gets a mask."""

    def __init__(self) -> None:
        self._kinds = Kinds()
        self._keeps: dict[Hashable, list[bool]] = {}  # which outputs keep dimension 1
        self._lock = threading.Lock()

    def parcel(self, tree: Any) -> Parcel:
        leaves, spec = _flat(tree)
        rows = _leading_rows(leaves)
        sequences = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 1]
        if not sequences:
            raise ArgumentValueError(
                f"x holds tensors of shapes {_shapes(leaves)}; with collate='pad' one of them "
                "must have a dimension 1, the one that is padded"
            )
        length = sequences[0].size(1)
        kinds = (_kind(leaf, ragged=_is_ragged(leaf, length)) for leaf in leaves)
        return Parcel(tuple(leaves), spec, rows, self._kinds.number(spec, *kinds), length)

    def run(
        self,
        function: Function,
        parcels: Sequence[Parcel],
        device: torch.device | None,
        home: Home | None = None,
    ) -> list[Any]:
        leaves, spec = self._call(function, parcels, device)
        lengths = [parcel.length for parcel in parcels]
        keeps = [False] * len(leaves)
        if min(lengths) != max(lengths):
            keeps = self._known_kept(function, parcels, device, leaves)
        return _dealt(leaves, spec, list(map(_rows, parcels)), keeps, lengths, home)

    def positions(self, parcels: Sequence[Parcel]) -> tuple[int, int]:
        longest = max(parcel.length for parcel in parcels)
        filled = sum(parcel.rows * parcel.length for parcel in parcels)
        return filled, longest * sum(parcel.rows for parcel in parcels)

    def _call(
        self, function: Function, parcels: Sequence[Parcel], device: torch.device | None
    ) -> tuple[list[Any], TreeSpec]:
        longest = max(parcel.length for parcel in parcels)
        columns = zip(*[parcel.leaves for parcel in parcels], strict=True)
        batch = [_padded(column, parcels[0].length, longest) for column in columns]
        first = parcels[0]
        where = next(leaf.device for leaf in first.leaves if _is_ragged(leaf, first.length))
        mask = torch.cat([_mask(parcel.rows, parcel.length, longest, where) for parcel in parcels])
        tree = tree_unflatten(batch, parcels[0].spec)
        leaves, spec = _flat(function(_moved(tree, device), _moved(mask, device)))
        _check_rows(leaves, sum(parcel.rows for parcel in parcels))
        return leaves, spec

    def _known_kept(
        self,
        function: Function,
        parcels: Sequence[Parcel],
        device: torch.device | None,
        leaves: Sequence[Any],
    ) -> list[bool]:
        """Which outputs keep the padded dimension, found once for each kind of request."""
        group = parcels[0].group
        with self._lock:
            keeps = self._keeps.get(group)
        if keeps is None:
            keeps = self._find_kept(function, parcels, device, leaves)
            with self._lock:
                if len(self._keeps) >= _KINDS_REMEMBERED:
                    self._keeps.clear()
                self._keeps[group] = keeps
        longest = max(parcel.length for parcel in parcels)
        if len(keeps) != len(leaves) or any(
            keep and not _is_ragged(leaf, longest) for keep, leaf in zip(keeps, leaves, strict=True)
        ):
            raise OutputShapeError(
                f"model_or_fn returned tensors of shapes {_shapes(leaves)} for a padded length of "
                f"{longest}, where {sum(keeps)} of {len(keeps)} kept that length before: "
                "collate=(collate, split) takes any rule"
            )
        return keeps

    def _find_kept(
        self,
        function: Function,
        parcels: Sequence[Parcel],
        device: torch.device | None,
        leaves: Sequence[Any],
    ) -> list[bool]:
        """Run the shortest request alone: what is shorter by as much keeps the dimension.

        The size alone does not tell: ten classes and a padded length of ten look the same.
        """
        longest = max(parcel.length for parcel in parcels)
        shortest = min(parcels, key=lambda parcel: parcel.length)
        alone, _ = self._call(function, [shortest], device)
        if len(alone) != len(leaves):
            raise OutputShapeError(
                f"model_or_fn returned {len(leaves)} tensors for a padded batch and {len(alone)} "
                "for one request of it"
            )
        keeps = []
        for leaf, lone in zip(leaves, alone, strict=True):
            if leaf is None:
                keeps.append(False)
                continue
            keep = _is_ragged(leaf, longest) and _is_ragged(lone, shortest.length)
            keeps.append(keep)
            if lone is None or leaf.shape[1 + keep :] != lone.shape[1 + keep :]:
                raise OutputShapeError(
                    f"model_or_fn returned a tensor of shape {list(leaf.shape)} for a padded "
                    f"length of {longest} and {_shapes([lone]) or None} for {shortest.length}; "
                    "only dimension 1 may follow: collate=(collate, split) takes any rule"
                )
        return keeps


class CallablePair:
    """The caller's own `collate(requests)` and `split(output, requests)`."""

    def __init__(
        self, collate: Callable[[list[Any]], Any], split: Callable[[Any, list[Any]], Sequence[Any]]
    ) -> None:
        self._collate = collate
        self._split = split

    def parcel(self, tree: Any) -> Parcel:
        leaves, spec = _flat(tree)
        sizes = {leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        return Parcel(tuple(leaves), spec, sizes.pop() if len(sizes) == 1 else 1, None)

    def run(
        self,
        function: Function,
        parcels: Sequence[Parcel],
        device: torch.device | None,
        home: Home | None = None,
    ) -> list[Any]:
        if home is not None:
            home.is_left = True
        requests = [tree_unflatten(parcel.leaves, parcel.spec) for parcel in parcels]
        results = list(
            self._split(function(_moved(self._collate(requests), device)), list(requests))
        )
        if len(results) != len(requests):
            raise OutputShapeError(
                f"split returned {len(results)} results for {len(requests)} requests"
            )
        return results

    def positions(self, parcels: Sequence[Parcel]) -> tuple[int, int]:
        rows = sum(map(_rows, parcels))
        return rows, rows


def batching_for(collate: object) -> Batching:
    """The batching that `collate` names."""
    match collate:
        case "cat":
            return Concatenation()
        case "pad":
            return Padding()
        case (join, split) if callable(join) and callable(split):
            return CallablePair(join, split)
    raise ArgumentValueError(
        f"collate is {collate!r}; it must be 'cat', 'pad' or a pair of callables (collate, split)"
    )


def _leading_rows(leaves: Sequence[Any]) -> int:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ArgumentTypeError("x holds no tensor; it must be a tensor or a tree of them")
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ArgumentTypeError(f"x holds a tensor of {tensor.layout}; it must be strided")
    sizes = {tensor.size(0) if tensor.dim() else -1 for tensor in tensors}
    if len(sizes) > 1 or -1 in sizes:
        raise ArgumentValueError(
            f"x holds tensors of shapes {_shapes(leaves)}; their first dimension must be the rows "
            "of the request, the same in each"
        )
    return sizes.pop()


def _is_ragged(leaf: Any, length: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.size(1) == length


def _kind(leaf: Any, *, ragged: bool = False) -> Hashable:
    """What a leaf shares with those it is batched with: all but its rows and a ragged length."""
    if isinstance(leaf, Tensor):
        return leaf.shape[1 + ragged :], ragged, leaf.dtype, leaf.device
    try:
        hash(leaf)
    except TypeError:
        raise ArgumentTypeError(
            f"x holds a {type(leaf).__name__}; what is not a tensor must be hashable, because "
            "only requests that are equal in it share a batch"
        ) from None
    return type(leaf), leaf


def _shapes(leaves: Sequence[Any]) -> str:
    return ", ".join(str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor))


def _padded(column: tuple[Any, ...], length: int, longest: int) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    if not _is_ragged(column[0], length):
        return torch.cat(column)
    rows = sum(leaf.size(0) for leaf in column)
    batch = column[0].new_zeros(rows, longest, *column[0].shape[2:])
    start = 0
    for leaf in column:
        batch[start : start + leaf.size(0), : leaf.size(1)] = leaf
        start += leaf.size(0)
    return batch


def _mask(rows: int, length: int, longest: int, device: torch.device) -> Tensor:
    return (torch.arange(longest, device=device) < length).expand(rows, longest)


def _flat(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Its leaves and its structure. A lone tensor is not walked: torch leaves a cycle of references
    behind for each tree, and the collector comes for them.
    """
    return ([tree], _LEAF) if isinstance(tree, Tensor) else tree_flatten(tree)


def _moved(tree: Any, device: torch.device | None) -> Any:
    if device is None:
        return tree
    if isinstance(tree, Tensor):
        return tree.to(device)
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def _check_rows(leaves: Sequence[Any], rows: int) -> None:
    for leaf in leaves:
        if leaf is None or (isinstance(leaf, Tensor) and leaf.dim() and leaf.size(0) == rows):
            continue
        what = _shapes([leaf]) if isinstance(leaf, Tensor) else type(leaf).__name__
        raise OutputShapeError(
            f"model_or_fn returned {what} for a batch of {rows} rows; every result must be None "
            f"or a tensor whose first dimension is {rows}: collate=(collate, split) takes any rule"
        )


def _cut(leaf: Tensor, rows: list[int], home: Home | None = None) -> Sequence[Tensor]:
    """So many rows after so many, each in memory of its own."""
    if not leaf.is_cuda or not is_cut_at_once(leaf, rows):
        if home is not None:
            home.is_left = True
        parts: Sequence[Tensor] = _split_copy(leaf, rows)
        return parts
    # Into memory that is there with one kernel, else with one for each. That memory is cheaper
    # to take after the pattern of another tensor than after a list of sizes.
    patterns = {count: leaf[:count] for count in set(rows)}

    def make() -> list[Tensor]:
        return [torch.empty_like(patterns[count]) for count in rows]

    if home is not None and home.device == leaf.device:
        made = home.make(make)
    else:
        made = make()
        if home is not None:
            home.is_left = True
    _split_copy(leaf, rows, out=made)
    return made


def is_cut_at_once(leaf: Tensor, rows: list[int]) -> bool:
    """Whether torch's kernel for all parts is right: it copies `stride(0)` elements for each row as
    they lie in memory, also of a lone row that torch calls contiguous whatever its stride is, and
    divides by sizes.
    """
    return (
        0 not in leaf.shape
        and 0 not in rows
        and leaf.is_contiguous()
        and leaf.stride(0) == leaf.numel() // leaf.size(0)
    )


def _dealt(
    leaves: Sequence[Any],
    spec: TreeSpec,
    rows: list[int],
    keeps: Sequence[bool] = (),
    lengths: Sequence[int] = (),
    home: Home | None = None,
) -> list[Any]:
    """Each owner's rows of each leaf, cut to its length if kept, in memory of its own."""
    columns: list[Sequence[Any]] = []
    for n, leaf in enumerate(leaves):
        if leaf is None:
            columns.append([None] * len(rows))
        elif keeps and keeps[n]:
            if home is not None:
                home.is_left = True
            parts = zip(leaf.split(rows), lengths, strict=True)
            columns.append([part[:, :length].clone() for part, length in parts])
        else:
            columns.append(_cut(leaf, rows, home))
    if spec == _LEAF:
        return list(columns[0])
    return [tree_unflatten([column[n] for column in columns], spec) for n in range(len(rows))]
