from __future__ import annotations

import importlib.util
import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import orchard
from orchard.attention.api import attention
from orchard.cli import bench, main
from orchard.dispatch.planner import planner
from orchard.testing import benchmark, presets
from orchard.testing.benchmark import Case

pytestmark = pytest.mark.cli

TINY = {"batch": 1, "heads": 2, "kv_heads": 2, "rows": 8, "keys": 8, "dim": 8, "value_dim": 8}


def _tiny(device: torch.device, dtype: torch.dtype | None) -> list[Case]:
    """two cases in no time"""
    kind = dtype or torch.float32
    return [
        Case("plain", dtype=kind, **TINY),
        Case("trained, dropout", dtype=kind, dropout_p=0.2, backward=True, **TINY),
    ]


@pytest.fixture(autouse=True)
def _tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "tiny", _tiny)


def _bench(out: Path, *options: str) -> int:
    return main(["bench", "tiny", "--device=cpu", "--seconds=0.001", f"--out={out}", *options])


def _stored(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "tiny.jsonl").read_text().splitlines()]


def test_tables_data_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench(tmp_path / "new" / "folder") == 0
    shown, progress = capsys.readouterr()
    header = next(line for line in shown.splitlines() if "served by" in line)
    assert header.split()[0] == "ratio"
    assert "trained, dropout" in shown
    assert "GFLOP/s" in shown
    assert "bench tiny: 2/2" in progress
    picture = tmp_path / "new" / "folder" / "tiny.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    assert str(picture) in shown


def test_a_stored_row_says_everything(tmp_path: Path) -> None:
    assert _bench(tmp_path, "--no-plot") == 0
    plain, trained = _stored(tmp_path)
    assert (plain["preset"], plain["case"], plain["status"]) == ("tiny", "plain", "ok")
    assert {name: plain[name] for name in TINY} == TINY
    assert (plain["dtype"], plain["causal"], plain["mask"]) == ("float32", False, None)
    assert (plain["step"], trained["step"]) == ("forward", "forward+backward")
    assert trained["flops"] == 3.5 * plain["flops"] == 3.5 * 4 * 2 * 8 * 8 * 8
    assert plain["rounds"] >= benchmark.FEWEST_ROUNDS
    for row in (plain, trained):
        assert row["ratio"]["p20"] <= row["ratio"]["p50"] <= row["ratio"]["p80"]
        for side in (row["ours"], row["torch"]):
            assert 0 < side["seconds"]["p20"] <= side["seconds"]["p50"] <= side["seconds"]["p80"]
            assert side["gflops"] == pytest.approx(row["flops"] / side["seconds"]["p50"] / 1e9)
            assert side["peak_bytes"] > 0
    assert set(plain["served"]) == {"forward"}
    assert set(plain["served"].values()) <= set(planner().backends)
    assert set(trained["served"]) == {"forward", "backward"}
    assert all("/" in kernel for kernel in trained["kernels"])
    found = plain["ours"]["check"]
    assert (found["ok"], found["whole"], found["last_rows"]) == (True, True, 8)
    assert found["results"]["out"]["error"] <= found["results"]["out"]["budget"]
    assert set(trained["ours"]["check"]["results"]) == {
        "out",
        "grad_query",
        "grad_key",
        "grad_value",
    }
    assert trained["torch"]["check"] is None


def test_a_stored_row_names_its_machine(tmp_path: Path) -> None:
    _bench(tmp_path, "--no-plot")
    facts = _stored(tmp_path)[0]["machine"]
    assert facts["cpu"]
    assert facts["gpu"] is None
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cores"] >= 1
    assert facts["load"] >= 0
    assert (facts["torch"], facts["orchard"]) == (torch.__version__, orchard.__version__)
    assert datetime.fromisoformat(facts["date"]).utcoffset() == timedelta(0)


def test_a_wrong_result_shows_no_speed_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, dropout_p: float, **options: Any) -> torch.Tensor:
        out = attention(*args, dropout_p=dropout_p, **options)
        return out if dropout_p else out + 0.5

    monkeypatch.setattr(benchmark, "attention", wrong)
    assert _bench(tmp_path) == 1
    shown = capsys.readouterr().out
    speeds, others = (
        line.split("plain")
        for line in shown.splitlines()
        if "plain" in line and "error" not in line
    )
    assert speeds[0].strip() == "WRONG"
    assert speeds[1].split()[:2] == ["WRONG", "-"]
    assert others[1].split()[5:11] == ["-", "/", "-", "-", "/", "-"]
    assert "plain: WRONG: out: error" in shown
    plain, trained = _stored(tmp_path)
    assert (plain["status"], trained["status"]) == ("WRONG", "ok")
    assert plain["ratio"] is None
    assert plain["ours"]["seconds"] is None
    assert plain["torch"]["seconds"] is None
    assert trained["ours"]["seconds"] is not None
    assert (tmp_path / "tiny.png").stat().st_size > 10_000


def test_an_infinite_error_is_still_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "attention", lambda *a, **o: attention(*a, **o) * torch.nan)
    assert _bench(tmp_path, "--no-plot") == 1
    text = (tmp_path / "tiny.jsonl").read_text()
    assert "Infinity" not in text
    assert _stored(tmp_path)[0]["ours"]["check"]["results"]["out"]["error"] == "inf"


def test_a_backend_that_serves_some_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _bench(tmp_path, "--backend=aten") == 0
    assert "not served" in capsys.readouterr().out
    plain, trained = _stored(tmp_path)
    assert (plain["status"], trained["status"]) == ("ok", "not served")
    assert "dropout" in trained["ours"]["note"]


def test_json_lines_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench(tmp_path, "--json", "--no-plot", "--dtype=bfloat16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == _stored(tmp_path)
    assert {json.loads(line)["dtype"] for line in lines} == {"bfloat16"}


def test_svg_beside_png(tmp_path: Path) -> None:
    assert _bench(tmp_path, "--plot=svg") == 0
    assert "<svg" in (tmp_path / "tiny.svg").read_text()
    assert (tmp_path / "tiny.png").exists()


def test_no_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench(tmp_path, "--no-plot") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.jsonl"]
    assert "Plot" not in capsys.readouterr().out


def test_without_matplotlib_the_plot_is_left_out_and_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert _bench(tmp_path) == 0
    shown = capsys.readouterr().out
    assert "Plot left out: matplotlib is not installed" in shown
    assert "orchard-attention[plot]" in shown
    assert not (tmp_path / "tiny.png").exists()


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", f"--out={tmp_path / 'unused'}"]) == 0
    shown = capsys.readouterr().out
    for name in ("quick", "layouts", "dtypes", "train", "long"):
        assert name in shown
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["nonsense"], "'nonsense' is not one of quick, layouts, dtypes, train, long"),
        (["quick", "--backend=nobody"], "'nobody' is not one of auto, "),
        (["quick", "--device=tpu"], "'tpu' is not one of auto, cpu, cuda, mps"),
        (["quick", "--seconds=0"], "'0' is not a number above 0"),
        (["quick", "--seconds=soon"], "'soon' is not a number above 0"),
        (["quick", "--dtype=float64"], "invalid choice: 'float64'"),
        (["quick", "--plot=svg", "--no-plot"], "not allowed with"),
    ],
)
def test_bad_arguments(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *options])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchard.dispatch.report.visible_devices", lambda: (torch.device("cpu"),))
    with pytest.raises(SystemExit):
        main(["bench", "--device=mps"])
    assert "sees no mps device here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [(["cpu"], "cpu"), (["cpu", "mps"], "mps"), (["cpu", "cuda:0", "cuda:1"], "cuda:0")],
)
def test_auto_prefers_an_accelerator(
    kinds: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tuple(torch.device(kind) for kind in kinds)
    monkeypatch.setattr("orchard.dispatch.report.visible_devices", lambda: devices)
    assert str(bench._device("auto")) == chosen


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234.4, "1234"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.01234, "0.012"),
        (0.001234, "0.0012"),
        (None, "-"),
    ],
)
def test_numbers_have_about_three_digits(value: float | None, shown: str) -> None:
    assert bench._digits(value) == shown
