"""Requests become batches and batches become results, each row its owner's."""

from __future__ import annotations

import gc
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.serving.batching import (
    Batching,
    OutputShapeError,
    _cut,
    batching_for,
    is_cut_at_once,
)

Pair = namedtuple("Pair", ["left", "right"])


def run(batching: Batching, function: Any, *trees: Any) -> list[Any]:
    parcels = [batching.parcel(tree) for tree in trees]
    assert len({parcel.group for parcel in parcels}) == 1
    return batching.run(function, parcels, None)


def rows_of(start: int, rows: int, *rest: int) -> Tensor:
    return torch.arange(start, start + rows).view(-1, *[1] * len(rest)).expand(rows, *rest).float()


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda t: t, id="tensor"),
        pytest.param(lambda t: (t, t + 100), id="tuple"),
        pytest.param(lambda t: [t, (t * 2,)], id="nested"),
        pytest.param(lambda t: {"a": t, "b": [t - 1]}, id="dict"),
        pytest.param(lambda t: Pair(t, {"x": t}), id="namedtuple"),
    ],
)
def test_trees_come_back_to_their_owner(wrap: Any) -> None:
    """The identity over every kind of tree, with 1, 3, 0 and 2 rows."""
    batching = batching_for("cat")
    trees = [wrap(rows_of(10 * n, rows, 2)) for n, rows in enumerate([1, 3, 0, 2])]
    seen = []

    def function(tree: Any) -> Any:
        seen.append(tree)
        return tree

    results = run(batching, function, *trees)
    assert len(seen) == 1
    for tree, result in zip(trees, results, strict=True):
        assert type(result) is type(tree)
        torch.testing.assert_close(result, tree, rtol=0, atol=0)


def test_constants_are_passed_once() -> None:
    """What is no tensor reaches the function as it was given; None comes back as None."""
    results = run(
        batching_for("cat"),
        lambda tree: (tree["x"] * {"fast": 2}[tree["mode"]], tree["n"]),
        *({"x": torch.full((1,), n), "mode": "fast", "n": None} for n in (1, 2)),
    )
    assert [(x.tolist(), none) for x, none in results] == [([2], None), ([4], None)]


def test_results_and_batches_own_their_memory() -> None:
    """A function may write into its batch and return it; neither reaches a caller's tensor."""
    kept: list[Tensor] = []

    def function(batch: Tensor) -> Tensor:
        kept.append(batch.mul_(2))
        return batch

    for trees in ([torch.ones(2, 3)], [torch.ones(2, 3), torch.ones(1, 3)]):
        results = run(batching_for("cat"), function, *trees)
        kept.pop().zero_()
        results[0].add_(5)
        for tree in trees:
            assert tree.eq(1).all()
        assert results[0].eq(7).all()
        for other in results[1:]:
            assert other.eq(2).all()
            assert other.untyped_storage().nbytes() == other.nbytes


def test_results_that_share_memory_are_parted() -> None:
    """Rows that are one row in memory are not one in the results."""
    results = run(
        batching_for("cat"),
        lambda batch: torch.zeros(1, 2).expand(len(batch), 2),
        torch.ones(1, 1),
        torch.ones(1, 1),
    )
    results[0].fill_(9)
    assert results[1].eq(0).all()


@pytest.mark.parametrize("collate", ["cat", "pad"])
def test_lone_tensors_leave_nothing_to_the_collector(collate: str) -> None:
    """Memory is free again with the last reference, not when the collector comes."""
    batching = batching_for(collate)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            batching.run(
                lambda x, *mask: x,
                [batching.parcel(torch.ones(1, 2)) for _ in range(2)],
                torch.device("cpu"),
            )
        gc.collect()
        left = [each for each in gc.garbage if getattr(each, "__module__", "") == pytree.__name__]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []


@pytest.mark.parametrize("collate", ["cat", "pad"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(torch.ones(1, 2, 3), torch.ones(1, 2, 4), id="shape"),
        pytest.param(torch.ones(1, 2, 3), torch.ones(1, 2), id="dimensions"),
        pytest.param(torch.ones(1, 2), torch.ones(1, 2).double(), id="dtype"),
        pytest.param(torch.ones(1, 2), torch.ones(1, 2, device="meta"), id="device"),
        pytest.param(torch.ones(1, 2), (torch.ones(1, 2),), id="structure"),
        pytest.param({"a": torch.ones(1, 2)}, {"b": torch.ones(1, 2)}, id="keys"),
        pytest.param((torch.ones(1, 2), 1), (torch.ones(1, 2), 2), id="constant"),
        pytest.param((torch.ones(1, 2), 1), (torch.ones(1, 2), True), id="constant-type"),
    ],
)
def test_what_differs_is_not_batched(collate: str, one: Any, other: Any) -> None:
    batching = batching_for(collate)
    assert batching.parcel(one).group != batching.parcel(other).group


def test_rows_alone_make_no_group() -> None:
    batching = batching_for("cat")
    assert batching.parcel(torch.ones(1, 2)).group == batching.parcel(torch.ones(9, 2)).group
    assert batching.parcel(torch.ones(9, 2)).rows == 9


@pytest.mark.errors
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (3, ArgumentTypeError, "x holds no tensor"),
        ({"a": None}, ArgumentTypeError, "x holds no tensor"),
        (torch.tensor(1.0), ArgumentValueError, r"shapes \[\]; their first dimension"),
        ((torch.ones(1), torch.ones(2)), ArgumentValueError, r"shapes \[1\], \[2\]"),
        ((torch.ones(1, 1), {1, 2}), ArgumentTypeError, "x holds a set; .* hashable"),
        (torch.eye(2).to_sparse(), ArgumentTypeError, "torch.sparse_coo; it must be strided"),
    ],
)
def test_bad_requests(x: Any, error: type[Exception], words: str) -> None:
    for collate in ("cat", "pad"):
        with pytest.raises(error, match=words):
            batching_for(collate).parcel(x)


@pytest.mark.errors
def test_padding_needs_a_dimension() -> None:
    with pytest.raises(ArgumentValueError, match=r"shapes \[3\]; with collate='pad'"):
        batching_for("pad").parcel(torch.ones(3))


@pytest.mark.errors
@pytest.mark.parametrize("collate", ["stack", None, (len,), (len, 3), ("cat", "pad")])
def test_bad_collate(collate: Any) -> None:
    with pytest.raises(ArgumentValueError, match=r"collate is .*'cat', 'pad' or a pair"):
        batching_for(collate)


@pytest.mark.errors
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x.sum(0, keepdim=True), r"returned \[1, 2\] for a batch of 3 rows"),
        (lambda x: x.sum(), r"returned \[\] for"),
        (lambda x: (x, 1.5), "returned float for"),
    ],
)
def test_output_without_the_rows(function: Any, words: str) -> None:
    with pytest.raises(OutputShapeError, match=words):
        run(batching_for("cat"), function, torch.ones(1, 2), torch.ones(2, 2))


def attend(x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What a padded function does: positions that are no positions change nothing."""
    kept = x.masked_fill(~mask[..., None], 0)
    return {"each": x * 2 + mask.sum(1)[:, None, None], "whole": kept.sum(1)}


def test_padding_is_cut_off() -> None:
    """Lengths 3, 5, 1, 5: results are the lone ones, the lengths their own."""
    batching = batching_for("pad")
    trees = [
        torch.randint(1, 9, (rows, length, 2)).float()
        for rows, length in [(2, 3), (1, 5), (1, 1), (3, 5)]
    ]
    results = run(batching, attend, *trees)
    for tree, result in zip(trees, results, strict=True):
        alone = attend(tree, torch.ones(tree.shape[:2], dtype=torch.bool))
        torch.testing.assert_close(result, alone, rtol=0, atol=0)
        assert result["each"].untyped_storage().nbytes() == result["each"].nbytes
    parcels = [batching.parcel(tree) for tree in trees]
    assert batching.positions(parcels) == (2 * 3 + 5 + 1 + 15, 7 * 5)


def test_padding_is_zero_and_masked() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def function(x: Tensor, mask: Tensor) -> Tensor:
        seen.append((x.clone(), mask))
        return x

    run(batching_for("pad"), function, torch.ones(1, 1), torch.ones(2, 3))
    x, mask = seen[0]
    assert x.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert mask.tolist() == [[True, False, False], [True] * 3, [True] * 3]


def test_a_size_that_happens_to_be_the_padded_length_is_kept() -> None:
    """Five classes and a padded length of five: the classes are not cut."""
    calls = []

    def classify(x: Tensor, mask: Tensor) -> Tensor:
        calls.append(len(x))
        return (x * mask).sum(1, keepdim=True) + torch.arange(5.0)

    batching = batching_for("pad")
    first = run(batching, classify, torch.ones(1, 2), torch.ones(1, 5))
    assert [result.tolist() for result in first] == [[[2, 3, 4, 5, 6]], [[5, 6, 7, 8, 9]]]
    assert calls == [2, 1]  # the shortest was run alone to find out
    second = run(batching, classify, torch.ones(1, 5), torch.ones(1, 3))
    assert [result.tolist() for result in second] == [[[5, 6, 7, 8, 9]], [[3, 4, 5, 6, 7]]]
    assert calls == [2, 1, 2]


def test_leaves_without_the_length_are_not_padded() -> None:
    """Beside a ragged leaf: one of another fixed size, one without that dimension."""
    trees = [
        {"x": torch.ones(1, length), "fixed": torch.full((1, 7), length), "row": torch.ones(1)}
        for length in (2, 4)
    ]
    results = run(batching_for("pad"), lambda tree, mask: (tree["fixed"], mask), *trees)
    assert results[0][0].tolist() == [[2] * 7]
    assert results[1][0].tolist() == [[4] * 7]
    assert [result[1].tolist() for result in results] == [[[True] * 2], [[True] * 4]]


@pytest.mark.errors
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, mask: x[:, :, None] * x[:, None], "only dimension 1 may follow"),
        (lambda x, mask: torch.cat([x, x[:, :1]], 1), "only dimension 1 may follow"),
        (lambda x, mask: [x] * x.size(1), "returned 3 tensors for a padded batch and 1 for"),
    ],
)
def test_other_rules_of_length_are_refused(function: Any, words: str) -> None:
    with pytest.raises(OutputShapeError, match=words):
        run(batching_for("pad"), function, torch.ones(1, 1), torch.ones(1, 3))


@pytest.mark.errors
def test_a_function_that_changes_its_rule_is_refused() -> None:
    keep = [True, True, False]
    batching = batching_for("pad")

    def function(x: Tensor, mask: Tensor) -> Tensor:
        return x if keep.pop(0) else x[:, :1]

    run(batching, function, torch.ones(1, 2), torch.ones(1, 3))
    with pytest.raises(OutputShapeError, match="1 of 1 kept that length before"):
        run(batching, function, torch.ones(1, 2), torch.ones(1, 3))


def test_a_pair_of_callables() -> None:
    """Requests that are no tensors at all."""
    words = [["a"], ["b", "c"], []]
    batching = batching_for(
        (
            lambda requests: [word for request in requests for word in request],
            lambda output, requests: [[output.pop(0) for _ in request] for request in requests],
        )
    )
    results = batching.run(
        lambda batch: [word.upper() for word in batch], [batching.parcel(x) for x in words], None
    )
    assert results == [["A"], ["B", "C"], []]
    assert batching.parcel(["a", "b"]).rows == 1
    assert batching.parcel((torch.ones(4, 2), "a")).rows == 4


@pytest.mark.errors
def test_a_pair_that_loses_a_request() -> None:
    batching = batching_for((list, lambda output, requests: output[1:]))
    with pytest.raises(OutputShapeError, match="split returned 1 results for 2 requests"):
        batching.run(lambda batch: batch, [batching.parcel("a"), batching.parcel("b")], None)


def test_batches_move_to_the_device() -> None:
    for collate, tree in (("cat", torch.ones(1, 2)), ("pad", {"x": torch.ones(1, 2), "n": 1})):
        batching = batching_for(collate)
        devices = []

        def function(x: Any, *mask: Tensor, devices: list[str] = devices) -> Tensor:
            tensor = x if isinstance(x, Tensor) else x["x"]
            devices.extend(str(t.device) for t in (tensor, *mask))
            return tensor

        batching.run(function, [batching.parcel(tree)], torch.device("meta"))
        assert set(devices) == {"meta"}


# Outputs of four rows and of a lone one, and whether they may be cut by torch's one kernel.
OUTPUTS = {
    "contiguous": (lambda n: torch.randn(n, 6, 5), True, True),
    "vector": (lambda n: torch.randn(n), True, True),
    "channels last": (
        lambda n: torch.randn(n, 6, 5, 3).to(memory_format=torch.channels_last),
        False,
        False,
    ),
    "transposed": (lambda n: torch.randn(6, n).t(), False, False),
    "inner axes swapped": (lambda n: torch.randn(n, 5, 6).transpose(1, 2), False, False),
    "first position of a sequence": (lambda n: torch.randn(n, 7, 4)[:, 0], False, False),
    "expanded": (lambda n: torch.randn(1, 4).expand(n, 4), False, True),
    "every second row": (lambda n: torch.randn(2 * n, 4)[::2], False, False),
    "no columns": (lambda n: torch.randn(n, 0), False, False),
    "bool": (lambda n: torch.randn(n, 3) > 0, True, True),
    "complex": (lambda n: torch.randn(n, 3, dtype=torch.complex64), True, True),
}


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_any_strides_are_cut_right(name: str, device: str) -> None:
    make, many_at_once, one_at_once = OUTPUTS[name]
    for rows, at_once in (([1, 2, 1], many_at_once), ([1], one_at_once), ([1, 0, 3], False)):
        with torch.device(device):
            output = make(sum(rows))
        assert is_cut_at_once(output, rows) == at_once
        parts = _cut(output, rows)
        for part, expected in zip(parts, output.split(rows), strict=True):
            assert torch.equal(part, expected)
        storages = {part.untyped_storage().data_ptr() for part in parts if part.numel()}
        assert len(storages) == sum(part.numel() > 0 for part in parts)
        assert output.untyped_storage().data_ptr() not in storages
