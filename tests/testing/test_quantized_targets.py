"""The table of quantised attention: what it holds, and how its lines are measured and met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchard.cli import main
from orchard.quantization import QuantizationConfig
from orchard.testing import targets
from orchard.testing.benchmark import Case, Check
from orchard.testing.quantized_steps import Quantised, QuantisedStep, quantised_step
from orchard.testing.quantized_targets import quantized
from orchard.testing.targets import Finding, Kind, Target, cells, measure_case

pytestmark = pytest.mark.cli

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TINY = Case("tiny", 1, 2, 2, 8, 8, 32, 32, torch.bfloat16)
INT8 = Quantised(QuantizationConfig(key_precision="int8", value_precision="int8"))


def _target(kind: Kind) -> Target:
    return Target("work", 0.55, 0.51, (TINY,), kind, quantised=INT8)


def test_the_table_of_quantised_attention() -> None:
    forward, cache = "S 2048, D 128, quantisation included", "Sq 1, Sk 4096, 32 heads, D 128"
    assert [(target.work, target.must, target.aim, target.kind) for target in quantized()] == [
        (f"int8 forward over bf16: {forward}", 1.15, 1.5, "quantised"),
        (f"int8 forward over torch: {forward}", 2.0, 3.0, "quantised-torch"),
        (f"int8 decode over bf16: {cache}, quantised cache", 1.6, 2.0, "quantised"),
        (f"int4 decode over bf16: {cache}, quantised cache", 2.4, 3.0, "quantised"),
        ("int8 key and value, bytes of bf16's", 0.55, 0.51, "bytes"),
    ]
    for target in quantized():
        (case,), how = target.cases, target.quantised
        assert how is not None
        assert how.cached == (case.rows == 1) == ("decode" in target.work)
        precision = "int4" if "int4" in target.work else "int8"
        assert (how.config.key_precision, how.config.value_precision) == (precision, precision)
        assert case.name == target.work


def test_times_are_of_the_same_rounds() -> None:
    ours = measure_case(_target("quantised"), TINY, "auto", 0.001)
    beside = ours.row.beside["quantised"].ratio
    assert ours.value == (1 / beside.p80, 1 / beside.p50, 1 / beside.p20)

    over_torch = measure_case(_target("quantised-torch"), TINY, "auto", 0.001)
    beside, ratio = over_torch.row.beside["quantised"].ratio, over_torch.row.ratio
    assert ratio is not None
    expected = (ratio.p50 / beside.p80, ratio.p50 / beside.p50, ratio.p50 / beside.p20)
    assert over_torch.value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("must", "aim", "met"), [(0.63, 0.6, "no"), (0.64, 0.63, "must"), (0.7, 0.64, "aim")]
)
def test_of_bytes_less_is_better(must: float, aim: float, met: str) -> None:
    # Of a head: 512 levels, a scale of key and of value, and the mean of its keys in fp32.
    share = (512 + 2 * 4 + 32 * 4) / (512 * 2)
    target = replace(_target("bytes"), must=must, aim=aim)
    finding = Finding(target, (measure_case(target, TINY, "auto", 0.001),))
    assert (finding.found, finding.met) == (pytest.approx(share), met)
    assert cells(finding.summary())[1:4] == ["0.63", "-", f"{must:g}"]


@pytest.mark.parametrize("kind", ["quantised", "quantised-torch", "bytes"])
def test_a_wrong_quantised_result_has_no_number(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def over_budget(case: Case, how: Quantised) -> QuantisedStep:
        made = quantised_step(case, how)
        far = tuple(replace(each, error=each.budget * 2) for each in made.check.comparisons)
        return replace(made, check=Check(made.check.part, far))

    monkeypatch.setattr(targets, "quantised_step", over_budget)
    point = measure_case(_target(kind), TINY, "auto", 0.001)
    assert (point.status, point.value) == ("WRONG", None)
    assert "quantised" not in point.row.beside


def test_what_is_quantised_has_to_be_said() -> None:
    with pytest.raises(ValueError, match="work: a target of kind bytes needs `quantised`"):
        measure_case(replace(_target("bytes"), quantised=None), TINY, "auto", 0.001)


def test_the_table_says_what_its_numbers_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ratios are not torch's time over ours, and neither title nor plot says so."""
    path = tmp_path / "quantized.jsonl"
    path.write_text((RESULTS / "quantized.jsonl").read_text())
    before = path.read_text()
    words = ["bench", "--preset", "quantized", f"--out={tmp_path}", "--resume", "--plot=svg"]
    assert main(words) == 0
    assert path.read_text() == before
    said, drawn = capsys.readouterr().out, (tmp_path / "quantized.svg").read_text()
    assert "time of what the line names / ours in few bits" in said
    assert "torch's time / ours" not in said
    assert "bytes in few bits / bytes in bf16" in drawn
    assert "torch's time" not in drawn
