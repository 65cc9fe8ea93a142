"""What a backend is to reach, as data: each line of the table with its cases, and how it is met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any, Literal

import torch

from orchard.quantization import QuantizationConfig
from orchard.testing.benchmark import Case, Row, Side, Spread, flops, measure
from orchard.testing.footprint import footprint
from orchard.testing.quantized_steps import Quantised, quantised_step

Kind = Literal["ratio", "decode", "matmul", "memory", "quantised", "quantised-torch", "bytes"]
Unit = Literal["x", "share", "MB"]
Table = Callable[[], list["Target"]]

CPU = torch.device("cpu")
MATMUL_SIZE = 2048
COPY_BYTES = 2**28  # far more than a cache holds
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SHARES = ("matmul", "bytes")
HEADERS = ("work", "found", "worst to best", "must", "aim", "met")

_LENGTHS = (512, 1024, 2048, 4096)
_SHORTER = (512, 1024, 2048)  # where torch holds every score at once
_DIMS = ((64, 64), (128, 128))
_STRIDED = ("last_strided", "last_strided", "last_strided")


@dataclass(frozen=True)
class Target:
    """A line of the table: what the geometric mean over its cases must reach, and aims at.

    `ratio`: torch's time over ours. `decode`: the same, and the aim also asks for a share of the
    bandwidth of a memory copy. `matmul`: our rate as a share of torch's matrix product's.
    `memory`: megabytes beyond operands and results, where less is better. `quantised`: our time
    without quantisation over ours with it, `quantised-torch`: torch's over it, `bytes`: what key
    and value take, as a share of what they took, where less is better.
    """

    work: str
    must: float
    aim: float
    cases: tuple[Case, ...]
    kind: Kind = "ratio"
    copy_share: float | None = None
    quantised: Quantised | None = None

    @property
    def unit(self) -> Unit:
        return "MB" if self.kind == "memory" else "share" if self.kind in _SHARES else "x"

    @property
    def less_is_better(self) -> bool:
        return self.kind in ("memory", "bytes")


@dataclass(frozen=True)
class Point:
    """A case of a target, measured; `value` is in the target's unit, over its rounds."""

    row: Row
    value: Spread | None
    bandwidth: float | None = None  # of decode, bytes per second
    copy_share: float | None = None

    @property
    def status(self) -> str:
        """`ok`, or the word that stands where the number would be."""
        if self.row.ours.status != "ok":
            return self.row.ours.status
        if self.value is not None:
            return "ok"
        return f"torch {self.row.torch.status}"

    def data(self) -> dict[str, float] | None:
        return None if self.value is None else self.value._asdict()


@dataclass(frozen=True)
class Finding:
    """A target and what its cases came to."""

    target: Target
    points: tuple[Point, ...]

    @property
    def values(self) -> list[float]:
        return [point.value.p50 for point in self.points if point.value is not None]

    @property
    def status(self) -> str:
        """`ok`, or what is wrong with the first case of ours that has no number."""
        lost = [p.status for p in self.points if p.row.ours.status != "ok"]
        if lost:
            return "WRONG" if "WRONG" in lost else lost[0]
        return "ok" if self.values else self.points[0].status

    @property
    def found(self) -> float | None:
        if self.status != "ok":
            return None
        return geometric_mean([max(value, 1e-9) for value in self.values])

    @property
    def range(self) -> tuple[float, float] | None:
        """The worst and the best case; of a single case, p20 and p80 of its rounds."""
        if self.found is None:
            return None
        values = self.values
        if len(self.points) == 1 and self.points[0].value is not None:
            values = [self.points[0].value.p20, self.points[0].value.p80]
        low, high = min(values), max(values)
        return (high, low) if self.target.less_is_better else (low, high)

    @property
    def copy_share(self) -> float | None:
        shares = [point.copy_share for point in self.points if point.copy_share is not None]
        return min(shares, default=None)

    @property
    def met(self) -> Literal["aim", "must", "no"]:
        """What is reached; a case of ours without a number reaches nothing."""
        found, target = self.found, self.target
        if found is None:
            return "no"
        better = _at_most if target.less_is_better else _at_least
        also = target.copy_share is None or (self.copy_share or 0.0) >= target.copy_share
        if better(found, target.aim) and also:
            return "aim"
        return "must" if better(found, target.must) else "no"

    def summary(self) -> dict[str, Any]:
        """The line of the table as data; `cells` makes it readable."""
        target, bandwidths = self.target, [p.bandwidth for p in self.points if p.bandwidth]
        worst, best = self.range or (None, None)
        return {
            "target": target.work,
            "unit": target.unit,
            "found": self.found,
            "worst": worst,
            "best": best,
            "must": target.must,
            "aim": target.aim,
            "aim_copy_share": target.copy_share,
            "met": self.met,
            "status": self.status,
            "cases": len(self.points),
            "compared": len(self.values),
            "bandwidth": min(bandwidths, default=None),
            "copy_share": self.copy_share,
        }


def _at_least(value: float, limit: float) -> bool:
    return value >= limit


def _at_most(value: float, limit: float) -> bool:
    return value <= limit


def cells(summary: dict[str, Any]) -> list[str]:
    """A summary for people, in the order of HEADERS."""
    unit, share = summary["unit"], summary["aim_copy_share"]
    found = summary["status"]
    if summary["found"] is not None:
        found = _amount(summary["found"], unit)
        if summary["bandwidth"] is not None:
            found += f", {summary['bandwidth'] / 1e9:.1f} GB/s"
        if summary["copy_share"] is not None:
            found += f", {summary['copy_share']:.0%} of a copy"
        if summary["compared"] < summary["cases"]:
            found += f" ({summary['compared']} of {summary['cases']} cases)"
    ends = "-"
    if summary["worst"] != summary["best"]:
        ends = f"{_amount(summary['worst'], unit)} to {_amount(summary['best'], unit)}"
    aim = _limit(summary["aim"], unit) + (f", {share:.0%} of a copy" if share else "")
    return [summary["target"], found, ends, _limit(summary["must"], unit), aim, summary["met"]]


def _amount(value: float, unit: Unit) -> str:
    if unit == "MB":
        return f"{value:.1f} MB"
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return f"{text}x" if unit == "x" else text


def _limit(value: float, unit: Unit) -> str:
    return {"x": f"{value:g}x", "share": f"{value:g}", "MB": f"{value:g} MB"}[unit]


def measure_case(target: Target, case: Case, backend: str, seconds: float) -> Point:
    """One case of `target` on the CPU, checked and measured."""
    if target.kind == "memory":
        used = footprint(case, backend)
        right = used.row.ours.status == "ok" and used.extra is not None
        return Point(used.row, _constant(max(used.extra or 0, 0) / 1e6) if right else None)
    timed = partial(measure, case, CPU, backend, seconds, peaks=False)
    if target.quantised is not None:
        return _measure_quantised(target.kind, target.quantised, case, timed)
    if target.kind == "matmul":
        row = timed(beside={"matmul": _matmul(case.dtype)})
        scale = flops(case) / (2.0 * MATMUL_SIZE**3)
        return Point(row, _scaled(_beside(row, "matmul"), scale))
    if target.kind == "decode":
        row = timed(beside={"copy": _copy()})
        moved = bytes_moved(case)
        share = _scaled(_beside(row, "copy"), moved / (2.0 * COPY_BYTES))
        bandwidth = None if row.ours.seconds is None else moved / row.ours.seconds.p50
        return Point(row, row.ratio, bandwidth, None if share is None else share.p50)
    row = timed()
    return Point(row, row.ratio)


def _measure_quantised(
    kind: Kind, quantised: Quantised, case: Case, timed: Callable[..., Row]
) -> Point:
    """The case as it is and quantised, in the same rounds."""
    made = quantised_step(case, quantised)
    row = timed(beside={"quantised": made.step})
    if not made.check.ok:
        return Point(replace(row, ours=Side("WRONG", str(made.check), made.check)), None)
    if kind == "bytes":
        return Point(row, _constant(made.share_of_bytes))
    beside = _beside(row, "quantised")
    if beside is None or row.ratio is None:
        return Point(row, None)
    over = row.ratio.p50 if kind == "quantised-torch" else 1.0
    return Point(row, Spread(over / beside.p80, over / beside.p50, over / beside.p20))


def _constant(value: float) -> Spread:
    return Spread(value, value, value)


def _beside(row: Row, name: str) -> Spread | None:
    return row.beside[name].ratio if name in row.beside else None


def _scaled(spread: Spread | None, factor: float) -> Spread | None:
    return None if spread is None else Spread(*(factor * value for value in spread))


def bytes_moved(case: Case) -> int:
    """Bytes of the operands and the output, each counted once."""
    rows = case.heads * case.rows * (case.dim + case.value_dim)
    keys = case.kv_heads * case.keys * (case.dim + case.value_dim)
    return case.batch * (rows + keys) * case.dtype.itemsize


def _matmul(dtype: torch.dtype) -> Callable[[], object]:
    """torch's own product of square matrices, into memory that is already there."""
    left, right, out = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype) for _ in range(3))
    return partial(torch.mm, left, right, out=out)


def _copy() -> Callable[[], object]:
    """A copy by torch: it reads COPY_BYTES and writes as many."""
    source, copy = (torch.ones(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    return partial(copy.copy_, source)


def _grid(
    work: str,
    dtypes: Sequence[str],
    lengths: Sequence[int] = _LENGTHS,
    dims: Sequence[tuple[int, int]] = _DIMS,
    **more: Any,
) -> tuple[Case, ...]:
    """Every length, head dimension and dtype, full and causal, one batch of eight heads."""
    return tuple(
        Case(
            _name(work, name if len(dtypes) > 1 else "", s, d, dv, causal),
            batch=1,
            rows=s,
            keys=s,
            dim=d,
            value_dim=dv,
            dtype=NAMES[name],
            causal=causal,
            **more,
        )
        for name in dtypes
        for s in lengths
        for d, dv in dims
        for causal in (False, True)
    )


def _name(work: str, dtype: str, s: int, d: int, dv: int, causal: bool) -> str:
    dims = f"D{d}" if d == dv else f"D{d}/{dv}"
    words = (dtype, f"S{s}", dims, "causal" if causal else "full")
    return f"{work}: {' '.join(word for word in words if word)}"


def cpu() -> list[Target]:
    """the table of what the native CPU engine must reach, in about fifteen minutes on two cores"""
    forward = {"bf16": (1.8, 2.3), "fp16": (1.6, 2.0), "fp32": (1.02, 1.15)}
    trained = {"bf16": (1.3, 1.7), "fp16": (6.0, 9.0), "fp32": (1.02, 1.15)}
    both = ("fp32", "bf16")
    targets = []

    def ratio(work: str, must: float, aim: float, dtypes: Sequence[str], **more: Any) -> None:
        targets.append(Target(work, must, aim, _grid(work, dtypes, **more)))

    for dtype, limits in forward.items():
        ratio(f"{dtype} forward", *limits, [dtype])
    for dtype, limits in trained.items():
        ratio(f"{dtype} forward+backward", *limits, [dtype], backward=True)
        if dtype == "fp16":  # torch takes minutes for all of them
            shorter = tuple(case for case in targets[-1].cases if case.rows < 4096 or case.causal)
            targets[-1] = replace(targets[-1], cases=shorter)
    dropped = {"dropout_p": 0.1, "backward": True}
    for dtype in forward:
        ratio(f"dropout 0.1, forward+backward, {dtype}", 4.0, 7.0, [dtype], **dropped)
    ratio("last dimension strided, forward", 3.0, 5.0, both, lengths=_SHORTER, views=_STRIDED)
    other = {"lengths": _SHORTER, "dims": ((64, 128), (128, 64)), "backward": True}
    ratio("Dv != D, forward+backward", 2.0, 4.0, both, **other)
    biased = {"lengths": _SHORTER, "mask": "bias", "mask_grad": True, "backward": True}
    ratio("additive mask with gradient, forward+backward", 2.0, 4.0, both, **biased)
    return [*targets, _decode(), *_small(), *_matmul_shares(), _extra_memory()]


def _decode() -> Target:
    work = "decode: Sq 1, Sk 4096, 32 heads, D 128, bf16"
    case = Case(work, 1, 32, 32, rows=1, keys=4096, dim=128, value_dim=128, dtype=torch.bfloat16)
    return Target(work, 2.5, 3.3, (case,), "decode", copy_share=0.8)


def _small() -> list[Target]:
    """A text encoder's call, where what surrounds the attention counts."""
    targets = []
    for dtype in ("fp32", "bf16"):
        work = f"1x12x77x64, {dtype}"
        cases = _grid(work, [dtype], (77,), ((64, 64),))
        heads = tuple(replace(case, heads=12, kv_heads=12) for case in cases)
        targets.append(Target(work, 1.0, 1.3, heads))
    return targets


def _matmul_shares() -> list[Target]:
    targets = []
    for dtype, must, aim in (("fp32", 0.85, 0.95), ("bf16", 0.6, 0.8)):
        work = f"share of torch's matmul rate, D 128, S 2048, full, {dtype}"
        full = _grid(work, [dtype], (2048,), ((128, 128),))[0]
        targets.append(Target(work, must, aim, (replace(full, name=work),), "matmul"))
    return targets


def _extra_memory() -> Target:
    work = "extra memory of forward+backward, B1 H8 S16384 D64, fp32"
    case = Case(work, batch=1, rows=16384, keys=16384, backward=True, grad_rows=64)
    return Target(work, 64.0, 16.0, (case,), "memory")


def quantized() -> list[Target]:
    """int8 and int4 against our own bf16 and torch on the CPU, and what they take in memory"""
    forward = Case("", 1, 8, 8, 2048, 2048, 128, 128, torch.bfloat16)
    decode = Case("", 1, 32, 32, 1, 4096, 128, 128, torch.bfloat16)
    int8, int4 = (
        QuantizationConfig(key_precision=name, value_precision=name) for name in ("int8", "int4")
    )
    at = "S 2048, D 128, quantisation included"
    with_cache = "Sq 1, Sk 4096, 32 heads, D 128, quantised cache"
    lines: list[tuple[str, float, float, Case, Kind, Quantised]] = [
        (f"int8 forward over bf16: {at}", 1.15, 1.5, forward, "quantised", Quantised(int8)),
        (f"int8 forward over torch: {at}", 2.0, 3.0, forward, "quantised-torch", Quantised(int8)),
        (
            f"int8 decode over bf16: {with_cache}",
            1.6,
            2.0,
            decode,
            "quantised",
            Quantised(int8, cached=True),
        ),
        (
            f"int4 decode over bf16: {with_cache}",
            2.4,
            3.0,
            decode,
            "quantised",
            Quantised(int4, cached=True),
        ),
        ("int8 key and value, bytes of bf16's", 0.55, 0.51, forward, "bytes", Quantised(int8)),
    ]
    return [
        Target(work, must, aim, (replace(case, name=work),), kind, quantised=quantised)
        for work, must, aim, case, kind, quantised in lines
    ]


TABLES: dict[str, Table] = {table.__name__: table for table in (cpu, quantized)}
