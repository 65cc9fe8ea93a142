"""What a backend is to reach, as data: each line of a table with its cases, and how it is met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any, Literal, NamedTuple

import torch

from orchard.testing import torch_peers
from orchard.testing.benchmark import (
    TORCH,
    Case,
    Peer,
    Row,
    Side,
    Spread,
    build,
    flops,
    measure,
    our_step,
)
from orchard.testing.footprint import footprint
from orchard.testing.gpu_timing import enqueued, replayed
from orchard.testing.quantized_steps import Quantised, QuantisedStep, quantised_step

Kind = Literal[
    "ratio",
    "gpu_time",
    "host_time",
    "layout",
    "decode",
    "matmul",
    "memory",
    "quantised",
    "quantised-torch",
    "bytes",
]
Unit = Literal["x", "share", "us", "MB"]
Against = Literal["torch", "fused", "flex"]

CPU = torch.device("cpu")
MATMUL_SIZE = 2048
COPY_BYTES = 2**28  # far more than a cache holds
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADERS = ("work", "found", "worst to best", "must", "aim", "met")
UNITS: Mapping[Kind, Unit] = {
    "layout": "share",
    "matmul": "share",
    "host_time": "us",
    "memory": "MB",
    "bytes": "share",
}
LESS_IS_BETTER: tuple[Kind, ...] = ("host_time", "memory", "bytes")


@dataclass(frozen=True)
class Target:
    """A line of the table: what the geometric mean over its cases must reach, and aims at.

    `ratio`: torch's time over ours. `gpu_time`: the same of recorded calls, without the host's
    part. `host_time`: microseconds until our call is on its way. `layout`: our time on contiguous
    operands over that on the case's. `decode`: the ratio, and a share of the bandwidth of a
    memory copy. `matmul`: our rate as a share of torch's matrix product's. `memory`: megabytes
    beyond operands and results. `quantised`: our time without quantisation over ours with it.
    `quantised-torch`: torch's over it. `bytes`: what key and value take, as a share of what they
    took. Without `must` it is measured and held to nothing.
    """

    work: str
    must: float | None
    aim: float | None
    cases: tuple[Case, ...]
    kind: Kind = "ratio"
    copy_share: float | None = None  # which the aim asks for as well
    must_copy_share: float | None = None
    worst: float | None = None  # what every case must reach
    against: Against = "torch"
    fp32_dq: bool = False  # one fp32 gradient of the query is no extra memory
    quantised: Quantised | None = None

    @property
    def unit(self) -> Unit:
        return UNITS.get(self.kind, "x")

    @property
    def less_is_better(self) -> bool:
        return self.kind in LESS_IS_BETTER


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


def failed(case: Case, note: str) -> Point:
    """A case that came to nothing."""
    return Point(Row(case, Side("failed", note), Side("not measured"), None, 0, {}, ()), None)


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
    def met(self) -> Literal["aim", "must", "no", "-"]:
        """What is reached; a case of ours without a number reaches nothing."""
        found, target = self.found, self.target
        if found is None:
            return "no"
        if target.must is None:
            return "-"
        worst = min(self.values, key=self._goodness)
        must = (
            self._reaches(found, target.must)
            and (target.worst is None or self._reaches(worst, target.worst))
            and self._copies(target.must_copy_share)
        )
        if not must:
            return "no"
        aim = target.aim is not None and self._reaches(found, target.aim)
        return "aim" if aim and self._copies(target.copy_share) else "must"

    def _goodness(self, value: float) -> float:
        return -value if self.target.less_is_better else value

    def _reaches(self, value: float, limit: float) -> bool:
        return self._goodness(value) >= self._goodness(limit)

    def _copies(self, share: float | None) -> bool:
        return share is None or (self.copy_share or 0.0) >= share

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
            "values": self.values,
            "must": target.must,
            "must_worst": target.worst,
            "must_copy_share": target.must_copy_share,
            "aim": target.aim,
            "aim_copy_share": target.copy_share,
            "met": self.met,
            "status": self.status,
            "cases": len(self.points),
            "compared": len(self.values),
            "peers": dict(Counter(point.row.peer for point in self.points if point.row.ratio)),
            "bandwidth": min(bandwidths, default=None),
            "copy_share": self.copy_share,
        }


def cells(summary: dict[str, Any]) -> list[str]:
    """A summary for people, in the order of HEADERS."""
    unit = summary["unit"]
    found = summary["status"]
    if summary["found"] is not None:
        found = _amount(summary["found"], unit) + _peers(summary.get("peers", {}))
        if summary["bandwidth"] is not None:
            found += f", {summary['bandwidth'] / 1e9:.1f} GB/s"
        if summary["copy_share"] is not None:
            found += f", {summary['copy_share']:.0%} of a copy"
        if summary["compared"] < summary["cases"]:
            found += f" ({summary['compared']} of {summary['cases']} cases)"
    ends = "-"
    if summary["worst"] != summary["best"]:
        ends = f"{_amount(summary['worst'], unit)} to {_amount(summary['best'], unit)}"
    must = _limit(summary["must"], unit, summary.get("must_copy_share"))
    if summary.get("must_worst") is not None:
        must += f", worst {_limit(summary['must_worst'], unit)}"
    aim = _limit(summary["aim"], unit, summary["aim_copy_share"])
    return [summary["target"], found, ends, must, aim, summary["met"]]


def _peers(counts: dict[str, int]) -> str:
    """Who was the fastest, how often; nothing where there was torch as such alone."""
    if set(counts) <= {"torch"}:
        return ""
    names = (name if len(counts) == 1 else f"{name} {n}" for name, n in counts.items())
    return f" ({', '.join(names)})"


def _amount(value: float, unit: Unit) -> str:
    if unit in ("us", "MB"):
        return f"{value:.1f} {unit}"
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return f"{text}x" if unit == "x" else text


def _limit(value: float | None, unit: Unit, copy_share: float | None = None) -> str:
    if value is None:
        return "-"
    amount = {"x": f"{value:g}x", "share": f"{value:g}"}.get(unit, f"{value:g} {unit}")
    return f"{amount}, {copy_share:.0%} of a copy" if copy_share else amount


class _Means(NamedTuple):
    """How a case is measured, whatever it is."""

    device: torch.device
    backend: str
    seconds: float

    def row(self, case: Case, **more: Any) -> Row:
        return measure(case, self.device, self.backend, self.seconds, peaks=False, **more)


def measure_case(
    target: Target, case: Case, backend: str, seconds: float, device: torch.device = CPU
) -> Point:
    """One case of `target`, checked and measured."""
    return _MEASURES[target.kind](target, case, _Means(device, backend, seconds))


def peers_of(target: Target, case: Case, device: torch.device) -> dict[str, Peer]:
    """Those whose fastest a case of the target is compared with."""
    if target.against == "fused":
        return dict(torch_peers.FUSED)
    if target.against == "flex":
        return {"flex": torch_peers.flex(case, device)}
    return {"torch": TORCH}


def _ratio(target: Target, case: Case, means: _Means) -> Point:
    row = means.row(case, peers=peers_of(target, case, means.device))
    return Point(row, row.ratio)


def _gpu_time(target: Target, case: Case, means: _Means) -> Point:
    peers = peers_of(target, case, means.device)
    row = means.row(case, peers=peers, sampling=replayed)
    return Point(row, row.ratio)


def _host_time(target: Target, case: Case, means: _Means) -> Point:
    row = means.row(case, sampling=enqueued)
    # Operations over the host's time would be no rate of anything.
    row = replace(row, ours=replace(row.ours, gflops=None), torch=replace(row.torch, gflops=None))
    return Point(row, _scaled(row.ours.seconds, 1e6))


def _layout(target: Target, case: Case, means: _Means) -> Point:
    plain = replace(case, views=("contiguous",) * 3)
    step = partial(our_step, plain, build(plain, means.device), means.backend)
    row = means.row(case, peers={}, beside={"contiguous": step})
    return Point(row, _beside(row, "contiguous"))


def _decode(target: Target, case: Case, means: _Means) -> Point:
    peers = peers_of(target, case, means.device)
    row = means.row(case, peers=peers, beside={"copy": _copy(means.device)})
    moved = bytes_moved(case)
    share = _scaled(_beside(row, "copy"), moved / (2.0 * COPY_BYTES))
    bandwidth = None if row.ours.seconds is None else moved / row.ours.seconds.p50
    return Point(row, row.ratio, bandwidth, None if share is None else share.p50)


def _matmul_share(target: Target, case: Case, means: _Means) -> Point:
    row = means.row(case, beside={"matmul": _matmul(case.dtype, means.device)})
    scale = flops(case) / (2.0 * MATMUL_SIZE**3)
    return Point(row, _scaled(_beside(row, "matmul"), scale))


def _memory(target: Target, case: Case, means: _Means) -> Point:
    used = footprint(case, means.backend, means.device)
    if used.row.ours.status != "ok" or used.extra is None:
        return Point(used.row, None)
    allowed = 4 * case.batch * case.heads * case.rows * case.dim if target.fp32_dq else 0
    return Point(used.row, _constant(max(used.extra - allowed, 0) / 1e6))


def _quantised(target: Target, case: Case, means: _Means) -> Point:
    row, _ = _beside_quantised(target, case, means)
    return Point(row, _inverse(_beside(row, "quantised")))


def _quantised_over_torch(target: Target, case: Case, means: _Means) -> Point:
    row, _ = _beside_quantised(target, case, means)
    gain = _inverse(_beside(row, "quantised"))
    return Point(row, None if row.ratio is None else _scaled(gain, row.ratio.p50))


def _bytes(target: Target, case: Case, means: _Means) -> Point:
    row, made = _beside_quantised(target, case, means)
    return Point(row, _constant(made.share_of_bytes) if row.ours.status == "ok" else None)


def _beside_quantised(target: Target, case: Case, means: _Means) -> tuple[Row, QuantisedStep]:
    """The case as it is and quantised, in the same rounds; WRONG where quantised it is."""
    if target.quantised is None:
        raise ValueError(f"{target.work}: a target of kind {target.kind} needs `quantised`")
    made = quantised_step(case, target.quantised)
    row = means.row(case, beside={"quantised": made.step})
    if not made.check.ok:
        row = replace(row, ours=Side("WRONG", str(made.check), made.check), beside={})
    return row, made


_MEASURES: dict[Kind, Callable[[Target, Case, _Means], Point]] = {
    "ratio": _ratio,
    "gpu_time": _gpu_time,
    "host_time": _host_time,
    "layout": _layout,
    "decode": _decode,
    "matmul": _matmul_share,
    "memory": _memory,
    "quantised": _quantised,
    "quantised-torch": _quantised_over_torch,
    "bytes": _bytes,
}


def _beside(row: Row, name: str) -> Spread | None:
    return row.beside[name].ratio if name in row.beside else None


def _scaled(spread: Spread | None, factor: float) -> Spread | None:
    return None if spread is None else Spread(*(factor * value for value in spread))


def _inverse(spread: Spread | None) -> Spread | None:
    return None if spread is None else Spread(1 / spread.p80, 1 / spread.p50, 1 / spread.p20)


def _constant(value: float) -> Spread:
    return Spread(value, value, value)


def bytes_moved(case: Case) -> int:
    """Bytes of the operands and the output, each counted once."""
    rows = case.heads * case.rows * (case.dim + case.value_dim)
    keys = case.kv_heads * case.keys * (case.dim + case.value_dim)
    return case.batch * (rows + keys) * case.dtype.itemsize


def _matmul(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """torch's own product of square matrices, into memory that is already there."""
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    left, right, out = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    return partial(torch.mm, left, right, out=out)


def _copy(device: torch.device) -> Callable[[], object]:
    """A copy by torch: it reads COPY_BYTES and writes as many."""
    source, copy = (torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return partial(copy.copy_, source)


def case_name(work: str, dtype: str, s: int, d: int, dv: int, causal: bool) -> str:
    dims = f"D{d}" if d == dv else f"D{d}/{dv}"
    words = (dtype, f"S{s}", dims, "causal" if causal else "full")
    return f"{work}: {' '.join(word for word in words if word)}"
