"""Capabilities as data: every reason, each naming what stands in the way."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from orchard.attention.problem import (
    Band,
    Gradients,
    MaskSpec,
    Options,
    Problem,
    Saved,
    Tensors,
    Upstream,
    describe,
)
from orchard.backends.aten import AtenBackend
from orchard.backends.metal import MetalBackend
from orchard.backends.metal.emulated import EmulatedRuntime, MetalEmulatedBackend
from orchard.backends.reference import ReferenceBackend
from orchard.dispatch.backend import ANY_DEVICE, Capability, Reason
from orchard.dispatch.known import Known
from orchard.testing.metal import Emulator
from orchard.testing.reason_codes import capability_codes

pytestmark = [pytest.mark.dispatch]

EVERYTHING = ReferenceBackend.capabilities[0]
PLAIN = describe(Tensors(*(torch.zeros(2, 4, 8, 16) for _ in range(3))), Options(0.25))
STRIDES = PLAIN.query_strides
BACKWARD = {"stage": "backward", "grad": True, "grad_strides": STRIDES}
BOOL_MASK = MaskSpec(torch.bool, (1, 1, 8, 8), (64, 64, 8, 1))
ADDITIVE_MASK = BOOL_MASK._replace(dtype=torch.float32)
LONG_KEYS = {
    "key_shape": (2, 4, 9, 16),
    "value_shape": (2, 4, 9, 16),
    "key_strides": (576, 144, 16, 1),
    "value_strides": (576, 144, 16, 1),
}


class Lack(NamedTuple):
    """A capability that misses one thing, and a problem that needs exactly that."""

    code: str
    missing: dict[str, Any]
    needed: dict[str, Any]
    words: tuple[str, ...]  # what the sentence has to name
    fix: tuple[str, ...] = ()

    @property
    def capability(self) -> Capability:
        return replace(EVERYTHING, **self.missing)

    @property
    def problem(self) -> Problem:
        return PLAIN._replace(**self.needed)


def options(**changes: Any) -> dict[str, Any]:
    return {"options": PLAIN.options._replace(**changes)}


LACKS = {
    "device": Lack("device", {"devices": ("cuda",)}, {}, ("cpu",)),
    "backward": Lack("stage", {"stages": ("forward",)}, BACKWARD, ("backward",)),
    "double backward": Lack(
        "stage",
        {"stages": ("forward", "backward")},
        BACKWARD | {"stage": "double_backward"},
        ("double backward",),
    ),
    "dtype": Lack(
        "dtype",
        {"dtypes": (torch.float16, torch.bfloat16)},
        {},
        ("float32",),
        ("float16", "bfloat16"),
    ),
    "head dimension": Lack("head_dim", {"max_head_dim": 15}, {}, ("16", "15")),
    "wide value": Lack(
        "head_dim",
        {"max_head_dim": 16},
        {"value_shape": (2, 4, 8, 24), "value_strides": (768, 192, 24, 1)},
        ("24", "16"),
    ),
    "multiple": Lack("head_dim_multiple", {"head_dim_multiple": 5}, {}, ("16", "5"), ("pad",)),
    "multiple of value": Lack(
        "head_dim_multiple",
        {"head_dim_multiple": 16},
        {"value_shape": (2, 4, 8, 24), "value_strides": (768, 192, 24, 1)},
        ("24", "16"),
        ("pad",),
    ),
    "value dimension": Lack(
        "value_dim",
        {"other_value_dim": False},
        {"value_shape": (2, 4, 8, 24), "value_strides": (768, 192, 24, 1)},
        ("value", "24", "16"),
    ),
    "grouped heads": Lack(
        "grouped_heads",
        {"grouped_heads": False},
        {"key_shape": (2, 2, 8, 16), "value_shape": (2, 2, 8, 16)},
        ("2", "4", "heads"),
    ),
    "bool mask": Lack("mask", {"masks": ("additive",)}, {"mask": BOOL_MASK}, ("bool mask",)),
    "additive mask": Lack(
        "mask", {"masks": ("bool",)}, {"mask": ADDITIVE_MASK}, ("additive mask",)
    ),
    "mask dtype": Lack(
        "mask_dtype",
        {"mask_dtypes": (torch.bool, torch.float16)},
        {"mask": ADDITIVE_MASK},
        ("mask", "float32"),
        ("convert the mask",),
    ),
    "mask gradient": Lack(
        "mask_grad",
        {"mask_grad": False},
        BACKWARD | {"mask": ADDITIVE_MASK, "mask_grad": True},
        ("gradient", "mask"),
        ("detach the mask",),
    ),
    "mask with causal": Lack(
        "mask_with_band",
        {"mask_with_band": False},
        {"mask": BOOL_MASK} | options(band=Band(None, 0)),
        ("mask", "causal"),
        ("mask",),
    ),
    "causal": Lack(
        "band", {"bands": ()}, LONG_KEYS | options(band=Band(None, 0)), ("causal", "8", "9")
    ),
    "causal for flash's corner": Lack(
        "band",
        {"bands": ("bottom_right",)},
        LONG_KEYS | options(band=Band(None, 0)),
        ("causal", "8", "9"),
    ),
    "bottom-right": Lack(
        "band",
        {"bands": ("causal",)},
        LONG_KEYS | options(band=Band(None, 1)),
        ("bottom-right", "8", "9"),
    ),
    "window": Lack(
        "band",
        {"bands": ("causal", "bottom_right")},
        options(band=Band(-2, 3)),
        ("window", "8"),
    ),
    "softcap": Lack(
        "softcap", {"softcap": False}, options(softcap=2.0), ("softcap",), ("softcap",)
    ),
    "dropout": Lack(
        "dropout", {"dropout": False}, options(threshold=9), ("dropout",), ("dropout_p=0",)
    ),
    "returned lse": Lack("lse", {"lse": False}, {"lse": True}, ("lse",), ("return_lse",)),
    "lse for a backward": Lack(
        "lse", {"lse": False}, {"grad": True}, ("lse", "backward"), ("no_grad",)
    ),
    "gradient through lse": Lack(
        "lse_grad", {"lse_grad": False}, BACKWARD | {"lse": True}, ("gradient", "lse"), ("detach",)
    ),
    "no keys": Lack(
        "zero_size",
        {"zero_sizes": False},
        {"key_shape": (2, 4, 0, 16), "value_shape": (2, 4, 0, 16)},
        ("size 0", "key", "value"),
    ),
    "no rows": Lack(
        "zero_size", {"zero_sizes": False}, {"query_shape": (2, 4, 0, 16)}, ("size 0", "query")
    ),
    "strided query": Lack(
        "last_stride",
        {"strided_last_axis": False},
        {"query_strides": (1024, 256, 32, 2)},
        ("query", "stride 1"),
        ("contiguous",),
    ),
    "strided value": Lack(
        "last_stride",
        {"strided_last_axis": False},
        {"value_strides": (1024, 256, 32, 2)},
        ("value", "stride 1"),
        ("contiguous",),
    ),
    "strided grad_out": Lack(
        "grad_stride",
        {"strided_grad_out": False},
        BACKWARD | {"grad_strides": (1024, 256, 32, 2)},
        ("grad_out", "stride 1"),
        ("contiguous",),
    ),
    "expanded grad_out": Lack(
        "grad_stride",
        {"strided_grad_out": False},
        BACKWARD | {"grad_strides": (0, 0, 0, 0)},
        ("grad_out", "stride 1"),
        ("contiguous",),
    ),
    "offset": Lack(
        "alignment", {"unaligned_rows": False}, {"aligned": False}, ("16-byte",), ("16 bytes",)
    ),
    "row stride": Lack(
        "alignment",
        {"unaligned_rows": False},
        {"key_strides": (608, 152, 19, 1)},
        ("16-byte",),
        ("16 bytes",),
    ),
    "row stride of grad_out": Lack(
        "alignment",
        {"unaligned_rows": False},
        BACKWARD | {"grad_strides": (608, 152, 19, 1)},
        ("16-byte",),
        ("16 bytes",),
    ),
    "long axis": Lack(
        "size",
        {"size_limit": 16 + 1},
        {"value_shape": (2, 4, 8, 17), "value_strides": (768, 192, 24, 1)},
        ("axis", "17"),
    ),
    "many heads": Lack(
        "size",
        {"size_limit": 2 * 16},
        {"query_shape": (8, 4, 8, 16), "key_shape": (8, 4, 8, 16), "value_shape": (8, 4, 8, 16)},
        ("heads", "32"),
    ),
    "deterministic": Lack(
        "deterministic",
        {"deterministic": False},
        BACKWARD | {"deterministic": True},
        ("deterministic", "backward"),
    ),
}


def names(sentence: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", sentence) is not None


@pytest.mark.parametrize("name", LACKS)
def test_reason(name: str) -> None:
    """A missing capability gives exactly its reason, where it is needed and only there."""
    lack = LACKS[name]
    assert EVERYTHING.reasons(lack.problem) == ()
    reasons = lack.capability.reasons(lack.problem)
    assert [reason.code for reason in reasons] == [lack.code]
    if lack.needed:
        assert lack.capability.reasons(PLAIN) == ()


@pytest.mark.parametrize("name", LACKS)
def test_reason_names_what_stands_in_the_way(name: str) -> None:
    """The sentence names the operand or number at fault, the fix what would change it."""
    lack = LACKS[name]
    (reason,) = lack.capability.reasons(lack.problem)
    assert [word for word in lack.words if not names(reason.sentence, word)] == []
    assert [word for word in lack.fix if word not in reason.fix] == []


@pytest.mark.parametrize(
    ("name", "innocent"),
    [
        ("strided query", ("key", "value")),
        ("strided value", ("query", "key")),
        ("no rows", ("key", "value")),
        ("no keys", ("query",)),
    ],
)
def test_reason_blames_no_other_operand(name: str, innocent: tuple[str, ...]) -> None:
    """Operands that are as they should be are not named."""
    (reason,) = LACKS[name].capability.reasons(LACKS[name].problem)
    assert [word for word in innocent if names(reason.sentence, word)] == []


def test_every_code_is_covered() -> None:
    """The cases above are all the codes that Capability.reasons can give."""
    given = capability_codes()
    assert len(given) >= 20
    assert {lack.code for lack in LACKS.values()} == given


def test_all_reasons_are_collected() -> None:
    """A kernel that misses everything gives every reason of a backward, not the first."""
    bare = Capability(
        "bare",
        devices=("mps",),
        dtypes=(torch.float16,),
        stages=("forward",),
        max_head_dim=8,
        head_dim_multiple=16,
        mask_dtypes=(torch.float16,),
        size_limit=8,
    )
    problem = PLAIN._replace(
        stage="backward",
        grad=True,
        grad_strides=(0, 0, 0, 0),
        query_strides=(1024, 256, 32, 2),
        key_shape=(2, 2, 0, 16),
        value_shape=(2, 2, 0, 12),
        mask=ADDITIVE_MASK,
        mask_grad=True,
        lse=True,
        aligned=False,
        deterministic=True,
        options=Options(0.25, 2.0, Band(-1, 3), 9),
    )
    assert EVERYTHING.reasons(problem) == ()
    codes = [reason.code for reason in bare.reasons(problem)]
    assert codes == [
        "device",
        "stage",
        "dtype",
        "head_dim",
        "head_dim_multiple",
        "value_dim",
        "grouped_heads",
        "mask",
        "mask_dtype",
        "mask_grad",
        "mask_with_band",
        "band",
        "softcap",
        "dropout",
        "lse_grad",
        "zero_size",
        "last_stride",
        "grad_stride",
        "alignment",
        "size",
        "deterministic",
    ]


def test_square_causal_is_one_thing() -> None:
    """With as many rows as keys, top-left and bottom-right are the same and either serves."""
    square = PLAIN._replace(**options(band=Band(None, 0)))
    for bands in (("causal",), ("bottom_right",)):
        assert replace(EVERYTHING, bands=bands).reasons(square) == ()
    assert replace(EVERYTHING, bands=()).reasons(square)[0].code == "band"


@pytest.mark.parametrize("width", [0, 1])
def test_last_stride_of_a_single_element_is_free(width: int) -> None:
    """An axis with at most one element has stride 1 whatever it says."""
    thin = PLAIN._replace(value_shape=(2, 4, 8, width), value_strides=(64, 16, 2, 7))
    assert replace(EVERYTHING, strided_last_axis=False).reasons(thin) == ()


def test_devices() -> None:
    """A table serves the devices it lists, or any."""
    assert replace(EVERYTHING, devices=ANY_DEVICE).on(torch.device("xpu"))
    assert replace(EVERYTHING, devices=("cuda",)).on(torch.device("cuda", 3))
    assert not replace(EVERYTHING, devices=("cuda",)).on(torch.device("cpu"))


class Two(ReferenceBackend):
    """Two kernels, each without something, and a reason of its own."""

    name = "two"
    summary = "for tests"
    capabilities = (
        replace(EVERYTHING, kernel="first", softcap=False),
        replace(EVERYTHING, kernel="second", dropout=False),
        replace(EVERYTHING, kernel="elsewhere", devices=("cuda",)),
    )

    def special_reasons(self, capability: Capability, problem: Problem) -> tuple[Reason, ...]:
        if capability.kernel == "second" and problem.batch == 2:
            return (Reason("special", "does not like two"),)
        return ()


def test_select_takes_the_first_kernel_that_serves() -> None:
    """Kernels are tried in order, and special reasons count as reasons."""
    two = Two()
    chosen, reasons = two.select(PLAIN)
    assert chosen is Two.capabilities[0]
    assert reasons == ()
    one = PLAIN._replace(query_shape=(1, 4, 8, 16), **options(softcap=2.0))
    assert two.select(one)[0] is Two.capabilities[1]


def test_select_gives_every_reason_of_every_kernel() -> None:
    """Where no kernel serves, each says why by name; kernels of other devices stay silent."""
    chosen, reasons = Two().select(PLAIN._replace(**options(softcap=2.0, threshold=5)))
    assert chosen is None
    assert [(reason.code, reason.sentence.split(":")[0]) for reason in reasons] == [
        ("softcap", "first"),
        ("dropout", "second"),
        ("special", "second"),
    ]


def test_aten_says_why_not() -> None:
    """The table of torch's operators refuses each thing that they do not compute exactly."""
    problem = PLAIN._replace(
        dtype=torch.float64,
        value_shape=(2, 4, 8, 24),
        value_strides=(1536, 384, 48, 2),
        options=Options(0.25, 2.0, Band(-2, 3), 9),
    )
    codes = {reason.code for reason in AtenBackend().select(problem)[1]}
    assert codes == {"dtype", "value_dim", "band", "softcap", "dropout", "last_stride"}


def mps_problem(rows: int, keys: int, **changes: Any) -> Problem:
    """One that torch's kernel for MPS serves where rows and keys allow it."""
    query, key = torch.zeros(1, 2, rows, 64), torch.zeros(1, 2, keys, 64)
    problem = describe(Tensors(query, key, key), Options(0.125))
    return problem._replace(device=torch.device("mps"), **changes)


def mps_codes(problem: Problem) -> list[str]:
    """Reasons apart from the probe, which fails on a machine without MPS."""
    reasons = AtenBackend().select(problem)[1]
    return [reason.code for reason in reasons if reason.code != "unavailable"]


@pytest.mark.parametrize(
    ("rows", "keys", "codes"),
    [(8, 7, ["few_keys"]), (2, 1, ["few_keys"]), (8, 8, []), (1, 1, []), (9, 8, [])],
)
def test_few_keys_on_mps(rows: int, keys: int, codes: list[str]) -> None:
    """torch's decode kernel wants as many keys as rows, and its other one more than 8 rows."""
    assert mps_codes(mps_problem(rows, keys)) == codes


@pytest.mark.parametrize(
    ("changes", "far"),
    [
        ({"key_strides": (0, 2**31, 64, 1)}, True),
        ({"key_strides": (2**31, 0, 64, 1)}, False),  # of an axis with one entry
        ({"query_strides": (0, 2**31 - 31 * 64 - 63, 64, 1)}, True),
        ({"query_strides": (0, 2**31 - 31 * 64 - 64, 64, 1)}, False),
        ({"mask": MaskSpec(torch.bool, (1, 2, 1, 32), (0, 2**31, 0, 1))}, True),
    ],
)
@pytest.mark.parametrize(("version", "wide"), [("2.13.1", False), ("2.15.0+cpu", True)])
def test_far_elements_on_mps(
    changes: dict[str, Any], far: bool, version: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 2.15 its kernel for MPS takes strides as 32-bit numbers."""
    monkeypatch.setattr(torch, "__version__", version)
    assert mps_codes(mps_problem(32, 32, **changes)) == (["offset"] if far and not wide else [])


@pytest.mark.parametrize(
    ("softcap", "served"), [(0.0, True), (1e-39, False), (2e-38, True), (1e38, True), (3e38, False)]
)
def test_softcap_on_metal(softcap: float, served: bool) -> None:
    """A softcap is a number of fp32, also as the kernels hold it, times log2(e)."""
    metal = MetalBackend()
    problem = mps_problem(8, 8, **options(softcap=softcap))
    reasons = metal.special_reasons(metal.capabilities[0], problem)
    assert [reason.code for reason in reasons] == ([] if served else ["softcap"])


class Wrong(ReferenceBackend):
    """Right, but for one number of one result."""

    name = "wrong"
    summary = "for tests"
    probe_rows = (1, 16)

    def __init__(self, rows: int, result: str) -> None:
        super().__init__()
        self.rows, self.result = rows, result

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        saved = super().forward(problem, kernel, tensors)
        return self._spoil(problem, saved)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        return self._spoil(problem, super().backward(problem, kernel, tensors, saved, upstream))

    def _spoil(self, problem: Problem, results: Any) -> Any:
        if problem.query_length == self.rows and self.result in results._fields:
            getattr(results, self.result)[0, 1, -1] += 9.0
        return results


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("result", ["out", "lse", "query", "key", "value"])
def test_probe_looks_at_every_result(rows: int, result: str) -> None:
    """Each number of rows is tried, both forward and backward, and all values compared."""
    wrong = Wrong(rows, result)
    reason = wrong.probe(wrong.capabilities[0], torch.device("cpu"))
    assert reason == Reason("unavailable", "its probe computed wrong values")
    right = Wrong(rows + 1, result)
    assert right.probe(right.capabilities[0], torch.device("cpu")) is None


@pytest.mark.metal
@pytest.mark.usefixtures("metal_compiler")
def test_probe_runs_the_kernels_of_ordinary_calls() -> None:
    """Forward, decode and backward of Metal have run before it counts as available."""
    emulator = Emulator()
    backend = MetalEmulatedBackend(EmulatedRuntime(emulator))
    assert backend.probe(backend.capabilities[0], torch.device("cpu")) is None
    ordinary = {"attention_forward", "attention_runs", "attention_join", "attention_rows"}
    assert {*ordinary, "attention_grad_query", "attention_grad_key_value"} <= set(emulator.counters)


def test_known_makes_each_value_once() -> None:
    """A value is made when it is first asked for, and forgotten only when there are too many."""
    made: list[int] = []

    def square(number: int) -> int:
        made.append(number)
        return number * number

    known = Known(square, most=3)
    assert [known[n] for n in (2, 3, 2, 0, 3)] == [4, 9, 4, 0, 9]
    assert made == [2, 3, 0]
    assert known[5] == 25
    assert dict(known) == {5: 25}


def test_known_keeps_nothing_that_failed() -> None:
    """A value that could not be made is tried again."""
    known = Known[int, float](lambda n: 1 / n)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            known[0]
    assert known == {}
