from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import orchard
from orchard.attention.api import attention
from orchard.cli import bench, main, rate_chart, serving_bench
from orchard.dispatch.planner import planner
from orchard.testing import benchmark, metal_counters, presets, tables, targets
from orchard.testing.benchmark import Case
from orchard.testing.metal import Counters, toolchain
from orchard.testing.metal_counters import Count, Exercise
from orchard.testing.tables import Table
from orchard.testing.targets import Target

pytestmark = pytest.mark.cli

TINY = {"batch": 1, "heads": 2, "kv_heads": 2, "rows": 8, "keys": 8, "dim": 8, "value_dim": 8}


def _tiny(device: torch.device, dtype: torch.dtype | None) -> list[Case]:
    """two cases in no time"""
    kind = dtype or torch.float32
    return [
        Case("plain", dtype=kind, **TINY),
        Case("trained, dropout", dtype=kind, dropout_p=0.2, backward=True, **TINY),
    ]


def _tiny_table() -> list[Target]:
    """two rows of a table in no time"""
    plain = Case("plain, first", **TINY)
    causal = Case("plain, second", causal=True, **TINY)
    decoded = Case("decode", **{**TINY, "rows": 1})
    trained = Case("plain trained", dropout_p=0.2, backward=True, **TINY)
    return [
        Target("plain", 1e-6, 1e6, (plain, causal)),
        Target("plain trained", 1e-7, 1e-6, (trained,)),
        Target("decode", 1e6, 1e7, (decoded,), "decode", copy_share=0.8),
        Target("share", 1e-9, 1e9, (plain,), "matmul"),
        Target("memory", 500.0, 0.0, (trained,), "memory"),
    ]


@pytest.fixture(autouse=True)
def _tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "tiny", _tiny)
    monkeypatch.setitem(tables.TABLES, "table", Table(_tiny_table))
    monkeypatch.setattr(targets, "MATMUL_SIZE", 16)
    monkeypatch.setattr(targets, "COPY_BYTES", 1000)


def _bench(out: Path, *options: str) -> int:
    return main(["bench", "tiny", "--device=cpu", "--seconds=0.001", f"--out={out}", *options])


def _table(out: Path, *options: str, backend: str = "auto") -> int:
    words = ["bench", "--preset", "table", "--seconds=0.001", f"--out={out}", *options]
    return main([*words, f"--backend={backend}"])


def _stored(out: Path, preset: str = "tiny") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{preset}.jsonl").read_text().splitlines()]


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


def test_a_table_of_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a line for each row
    assert _table(tmp_path) == 0
    shown, progress = capsys.readouterr()
    lines = shown.splitlines()
    header = next(n for n, line in enumerate(lines) if line.startswith("work"))
    assert lines[header].split() == ["work", "found", "worst", "to", "best", "must", "aim", "met"]
    rows = lines[header + 2 : lines.index("", header)]
    assert [line.split()[-1] for line in rows] == ["must", "aim", "no", "must", "must"]
    assert "GB/s" in shown
    assert "bench table: 6/6" in progress
    assert str(tmp_path / "table.png") in shown
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "table.png").stat().st_size > 10_000


def test_a_stored_table_has_its_cases_and_their_mean(tmp_path: Path) -> None:
    assert _table(tmp_path, "--no-plot") == 0
    stored = _stored(tmp_path, "table")
    whole = [line for line in stored if "found" in line]
    assert [line["target"] for line in whole] == [target.work for target in _tiny_table()]
    first, second, mean, trained, _, decode, decoded, share, shared, memory, extra = stored
    assert (first["case"], second["case"]) == ("plain, first", "plain, second")
    assert {line["target"] for line in (first, second, mean)} == {"plain"}
    product = first["value"]["p50"] * second["value"]["p50"]
    assert mean["found"] == pytest.approx(product**0.5)
    assert first["value"] == first["ratio"]
    assert {mean["worst"], mean["best"]} == {line["value"]["p50"] for line in (first, second)}
    assert (mean["must"], mean["aim"], mean["met"]) == (1e-6, 1e6, "must")
    assert (mean["unit"], mean["cases"], mean["compared"]) == ("x", 2, 2)
    assert first["ours"]["check"]["ok"]
    assert first["ours"]["peak_bytes"] is None
    assert trained["step"] == "forward+backward"
    assert set(decode["beside"]) == {"copy"}
    assert decoded["bandwidth"] > 0
    assert decoded["copy_share"] > 0
    assert set(share["beside"]) == {"matmul"}
    assert shared["unit"] == "share"
    assert (memory["ratio"], memory["torch"]["status"]) == (None, "not measured")
    assert extra["found"] == pytest.approx(memory["value"]["p50"])
    assert all(line["machine"]["threads"] == torch.get_num_threads() for line in stored)
    assert all(line["preset"] == "table" for line in stored)


def test_a_table_as_json_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _table(tmp_path, "--json", "--only=plain", "--plot=svg") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == _stored(tmp_path, "table")
    assert len(lines) == 3
    assert "reaches its aim" in (tmp_path / "table.svg").read_text()


def test_details_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _table(tmp_path, "--no-plot", "--only=plain", "--details") == 0
    shown = capsys.readouterr().out
    assert "served by" in shown
    assert "plain, second" in shown


@pytest.mark.parametrize(
    ("options", "works"),
    [
        (["--only=plain"], ["plain"]),
        (["--only=PLAIN T"], ["plain trained"]),
        (["--only=ai"], ["plain", "plain trained"]),
        (["--only=decode", "--only=plain"], ["plain", "decode"]),
    ],
)
def test_only_a_name_or_a_part_of_names(
    options: list[str], works: list[str], tmp_path: Path
) -> None:
    """A whole name is that row alone, though others contain it; rows keep their order."""
    assert _table(tmp_path, "--no-plot", *options) == 0
    assert [line["target"] for line in _stored(tmp_path, "table") if "found" in line] == works


def test_only_picks_cases_of_other_presets(tmp_path: Path) -> None:
    assert _bench(tmp_path, "--no-plot", "--only", "dropout") == 0
    assert [row["case"] for row in _stored(tmp_path)] == ["trained, dropout"]


def test_only_what_no_row_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _table(tmp_path / "unused", "--only=flash") == 2
    assert "no row has 'flash' in its name: plain; plain trained; decode" in capsys.readouterr().err
    assert not (tmp_path / "unused").exists()


def test_a_wrong_result_takes_its_row_and_the_command_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, causal: bool, **options: Any) -> torch.Tensor:
        out = attention(*args, causal=causal, **options)
        return out + 0.5 if causal else out

    monkeypatch.setattr(benchmark, "attention", wrong)
    assert _table(tmp_path, "--only=plain") == 1
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.startswith("plain "))
    assert row.split() == ["plain", "WRONG", "-", "1e-06x", "1e+06x", "no"]
    assert "plain, second: WRONG: out: error" in shown
    assert _stored(tmp_path, "table")[-1]["found"] is None
    assert (tmp_path / "table.png").stat().st_size > 10_000


def test_a_table_that_a_backend_serves_in_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _table(tmp_path, "--only=trained", "--only=memory", backend="aten") == 0
    shown = capsys.readouterr().out
    assert shown.count("not served") == 2
    assert "Not served, 1 of 2 cases: " in shown
    assert "dropout" in shown
    assert {line["status"] for line in _stored(tmp_path, "table")} == {"not served"}


def test_a_table_measures_the_backend_that_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def serve(target: Target, case: Case, backend: str, *others: Any) -> targets.Point:
        asked.append(backend)
        return measured(target, case, "auto", *others)

    measured = targets.measure_case
    monkeypatch.setattr(targets, "measure_case", serve)
    main(["bench", "table", "--only=plain", "--no-plot", "--seconds=0.001", f"--out={tmp_path}"])
    assert asked == ["cpu", "cpu"]


# Going on


def test_a_row_that_raises_fails_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(target: Target, case: Case, *others: Any) -> targets.Point:
        if case.causal:
            raise AssertionError("no such kernel")
        return measured(target, case, *others)

    measured = targets.measure_case
    monkeypatch.setattr(targets, "measure_case", measure)
    assert _table(tmp_path, "--only=plain", "--only=plain trained", "--no-plot") == 1
    assert "plain, second: failed: AssertionError: no such kernel" in capsys.readouterr().out
    summaries = [line for line in _stored(tmp_path, "table") if "found" in line]
    assert [(line["status"], line["met"]) for line in summaries] == [
        ("failed", "no"),
        ("ok", "aim"),
    ]


def test_resume_keeps_what_is_stored_and_measures_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last target had not come to its end, and the last line was cut short."""
    assert _table(tmp_path, "--only=plain", "--only=plain trained", "--no-plot") == 0
    path = tmp_path / "table.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:20]]))
    asked: list[str] = []

    def measure(target: Target, case: Case, *others: Any) -> targets.Point:
        asked.append(case.name)
        return measured(target, case, *others)

    measured = targets.measure_case
    monkeypatch.setattr(targets, "measure_case", measure)
    capsys.readouterr()
    assert _table(tmp_path, "--only=plain", "--only=plain trained", "--only=share", "--resume") == 0
    assert asked == ["plain trained", "plain, first"]
    assert path.read_text().splitlines()[:3] == lines[:3]
    works = [line["target"] for line in _stored(tmp_path, "table") if "found" in line]
    assert works == ["plain", "plain trained", "share"]
    shown = capsys.readouterr().out
    assert all(f"\n{work} " in shown for work in works)
    assert (tmp_path / "table.png").stat().st_size > 10_000


def test_a_whole_table_is_shown_again_without_its_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that it was measured on is named, not this one."""
    assert _table(tmp_path, "--no-plot") == 0
    path = tmp_path / "table.jsonl"
    path.write_text(path.read_text().replace('"gpu": null', '"gpu": "Some GPU"'))
    before = path.read_text()
    monkeypatch.setitem(tables.TABLES, "table", Table(_tiny_table, "cuda", "cuda"))
    monkeypatch.setattr("orchard.dispatch.report.visible_devices", lambda: (torch.device("cpu"),))
    capsys.readouterr()
    words = ["bench", "--preset", "table", f"--out={tmp_path}", "--resume", "--plot=svg"]
    assert main(words) == 0
    assert path.read_text() == before
    assert "table on Some GPU: torch's time / ours" in capsys.readouterr().out
    assert "Some GPU" in (tmp_path / "table.svg").read_text()


def test_resume_with_nothing_stored(tmp_path: Path) -> None:
    assert _table(tmp_path, "--only=decode", "--resume", "--no-plot") == 0
    assert len(_stored(tmp_path, "table")) == 2


def test_a_lost_device_is_left_to_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the target is not run, and the target is not tried again."""
    called: list[list[str]] = []

    def fail(target: Target, case: Case, *others: Any) -> targets.Point:
        raise RuntimeError("an illegal memory access was encountered")

    def call(words: list[str]) -> int:
        called.append(words)
        return 1

    monkeypatch.setattr(targets, "measure_case", fail)
    monkeypatch.setattr(bench, "_is_lost", lambda device: True)
    monkeypatch.setattr(bench.subprocess, "call", call)
    assert _table(tmp_path, "--no-plot", "--resume") == 1
    ((program, dash_m, module, *words),) = called
    assert (dash_m, module) == ("-m", "orchard")
    assert program
    assert words == [
        *("bench", "--preset", "table", "--seconds=0.001", f"--out={tmp_path}"),
        *("--no-plot", "--backend=auto", "--resume"),
    ]
    first, second, whole = _stored(tmp_path, "table")
    assert "illegal memory access" in first["ours"]["note"]
    assert "not run" in second["ours"]["note"]
    assert (whole["target"], whole["status"]) == ("plain", "failed")


def test_a_cpu_is_never_lost() -> None:
    assert not bench._is_lost(torch.device("cpu"))


def test_only_a_table_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tiny", "--resume"]) == 2
    assert "--resume is for tables of targets: cpu, cuda" in capsys.readouterr().err


# The table of another device


def test_a_table_whose_device_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchard.dispatch.report.visible_devices", lambda: (torch.device("cpu"),))
    assert main(["bench", "--preset", "cuda", f"--out={tmp_path / 'unused'}"]) == 2
    assert "the preset cuda needs one: torch" in capsys.readouterr().err
    assert main(["bench", "--preset", "cuda", "--device=cpu"]) == 2
    assert "is for cuda, not cpu" in capsys.readouterr().err
    assert not (tmp_path / "unused").exists()


def _rated_table() -> list[Target]:
    """rates of two lengths"""
    cases = [
        replace(case, name=f"S{length}, {case.name}", rows=length, keys=length)
        for case in (Case("plain", **TINY), Case("causal", causal=True, **TINY))
        for length in (8, 16)
    ]
    return [
        Target("rate by length, forward", None, None, tuple(cases), against="fused"),
        Target("plain", 1e-6, 1e6, (Case("plain", **TINY),)),
    ]


def test_rates_by_length_have_a_plot_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tables.TABLES, "table", Table(_rated_table))
    assert _table(tmp_path, "--plot=svg") == 0
    shown = capsys.readouterr().out
    assert "(flash)" in shown
    assert str(tmp_path / "table-rates.png") in shown
    assert (tmp_path / "table-rates.png").stat().st_size > 10_000
    drawn = (tmp_path / "table-rates.svg").read_text()
    for text in ("forward, D 8, full", "forward, D 8, causal", "Orchard", "flash", "TFLOP/s"):
        assert f"<!-- {text} -->" in drawn
    rated = rate_chart.rated_cases(_stored(tmp_path, "table"))
    assert len(rated) == 4
    panels = rate_chart.series(rated)
    assert list(panels) == [("forward", 8, False), ("forward", 8, True)]
    for lines in panels.values():
        assert set(lines) == {"ours", "flash"}
        assert [length for length, _ in lines["ours"]] == [8, 16]
    first = panels["forward", 8, False]["flash"][0][1]
    assert first == pytest.approx(rated[0]["peers"]["flash"]["gflops"] / 1e3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["tiny", "--preset=table"], "two presets: tiny and table"),
        (["table", "--dtype=float16"], "has its own dtypes"),
    ],
)
def test_arguments_that_do_not_go_together(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert complaint in capsys.readouterr().err


def test_a_table_of_the_cpu_on_another_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = (torch.device("cpu"), torch.device("mps"))
    monkeypatch.setattr("orchard.dispatch.report.visible_devices", lambda: devices)
    assert main(["bench", "table", "--device=mps"]) == 2
    assert "is for the CPU, not mps" in capsys.readouterr().err


def test_the_preset_as_an_option_or_by_its_place(tmp_path: Path) -> None:
    options = ["--device=cpu", "--seconds=0.001", "--no-plot", f"--out={tmp_path}"]
    for words in (["tiny"], ["--preset", "tiny"], ["tiny", "--preset=tiny"]):
        assert main(["bench", *words, *options]) == 0
        (tmp_path / "tiny.jsonl").unlink()


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", f"--out={tmp_path / 'unused'}"]) == 0
    shown = capsys.readouterr().out
    for name in ("quick", "layouts", "dtypes", "train", "long", "cpu", "cuda"):
        assert f"\n{name} " in shown
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["nonsense"], "'nonsense' is not one of quick, layouts, dtypes, train, long, "),
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


def _counters(multiplies: int, barriers: int) -> Counters:
    return Counters(
        multiplies, device_read=4000, device_written=2000, threadgroup_barriers=barriers
    )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts out of thin air: those of our forward may be changed."""
    ours = {"multiplies": 1000, "barriers": 10}

    def count(_: object, exercise: Exercise) -> Count:
        scale = 66 if exercise.causal else 131
        forward = _counters(ours["multiplies"] * scale, ours["barriers"])
        kernels = metal_counters.BACKWARD
        parts = {name: _counters(scale * 3000 // len(kernels), 4) for name in kernels}
        return Count(exercise, forward, _counters(1000 * scale, 10), parts)

    monkeypatch.setattr(metal_counters, "count", count)
    monkeypatch.setattr(toolchain, "find", lambda: None)
    return ours


def _count(out: Path, *options: str) -> int:
    return main(["bench", "--preset", "metal-emulated", f"--out={out}", *options])


def test_counts_of_metal_kernels(
    counted: dict[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both kernels beside each other, the backward, the limits, and a line for each problem."""
    monkeypatch.setenv("COLUMNS", "200")  # tables are not folded
    assert _count(tmp_path) == 0
    shown = capsys.readouterr().out
    assert "S 512, D 64, full, contiguous" in shown
    assert "131,000" in shown
    assert "all: 3.00 of" in shown
    assert "NO" not in shown
    lines = _stored(tmp_path, "metal-emulated")
    assert len(lines) == 8
    assert lines[0]["ours"]["multiplies"] == 131_000
    assert set(lines[0]["backward"]) == set(metal_counters.BACKWARD)
    assert all(limit["held"] for line in lines for limit in line["limits"])
    assert lines[0]["machine"]["torch"] == torch.__version__
    assert [len(line["limits"]) for line in lines[:4]] == [5, 5, 6, 6]


@pytest.mark.parametrize(("what", "value"), [("multiplies", 1021), ("barriers", 11)])
def test_a_limit_that_is_not_held_fails(
    what: str,
    value: int,
    counted: dict[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two percent above torch's is too much."""
    counted[what] = value
    assert _count(tmp_path, "--only", "D 128, full") == 1
    assert "NO" in capsys.readouterr().out
    lines = _stored(tmp_path, "metal-emulated")
    assert {line["dim"] for line in lines} == {128}
    broken = [limit for line in lines for limit in line["limits"] if not limit["held"]]
    assert {limit["what"] for limit in broken} == {f"{what} / torch's"}


def test_counts_are_of_one_backend(
    counted: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _count(tmp_path, "--backend", "cpu") == 2
    assert _count(tmp_path, "--dtype", "float16") == 2
    assert "counts what it is named after" in capsys.readouterr().err


def test_counts_need_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find() -> None:
        raise toolchain.NoCompilerError("there is no clang")

    monkeypatch.setattr(toolchain, "find", find)
    assert _count(tmp_path) == 2
    assert "there is no clang" in capsys.readouterr().err


# Serving


@pytest.fixture
def small_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that the goals are for, and one of each other kind, with few requests."""
    rows = [
        serving_bench.Clients("mlp", 32),
        serving_bench.Clients("gpt", 2),
        serving_bench.Bound("mlp", 3),
        serving_bench.Ceiling("mlp", 4, threads=2),
        serving_bench.Lanes(3),
        serving_bench.Overhead(),
        serving_bench.Lone(0.0005),
    ]
    monkeypatch.setattr(serving_bench, "EXERCISES", tuple(rows))
    monkeypatch.setattr(serving_bench, "ON_ONE_CORE", ())
    monkeypatch.setattr(serving_bench, "BURST", 20)
    monkeypatch.setattr(serving_bench, "QUESTIONS", 4)
    serving_bench._prepared.cache_clear()


def _serving(out: Path, *options: str) -> int:
    words = ["bench", "--preset", "serving", "--device=cpu", "--seconds=0.01", f"--out={out}"]
    return main([*words, *options])


@pytest.mark.usefixtures("small_serving")
def test_serving_rows_goals_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is stored with both sides; a table, the goals and the plot are views of it."""
    assert _serving(tmp_path) == 0
    lines = _stored(tmp_path, "serving")
    assert [line["case"] for line in lines] == [
        "mlp, 32 clients",
        "gpt, 2 clients",
        "mlp, 3 clients, bare queue",
        "mlp, 4 clients, whole batches from 2 threads",
        "attention, 3 threads",
        "queue overhead",
        "lone request, max_delay 0.5 ms",
    ]
    asked, gpt, bare, whole, lanes, overhead, lone = lines
    for line in (asked, gpt, bare, whole, lanes):
        for name in ("default", "lanes") if line is lanes else ("naive", "queue"):
            side = line[name]
            assert side["requests"] >= line.get("clients", line.get("threads"))
            assert side["p99"] >= side["p50"] > 0
            assert side["throughput"]["p50"] > 0
            assert side["wrong"] == 0
        assert line["ratio"]["p20"] <= line["ratio"]["p50"] <= line["ratio"]["p80"]
    assert 1 <= asked["mean_batch"] <= 32
    assert gpt["model"] == "gpt"
    assert overhead["overhead"]["p50"] > 0
    assert lone["p50"] >= lone["delay"] == 0.0005
    assert [goal["unit"] for line in lines for goal in line["goals"]] == ["x", "x", "us", "ms"]
    for goal in (goal for line in lines for goal in line["goals"]):
        enough = goal["found"] >= goal["limit"] if goal["at_least"] else None
        assert goal["held"] == (goal["found"] <= goal["limit"] if enough is None else enough)
    assert lines[0]["machine"]["device"] == "cpu"
    out = capsys.readouterr().out
    assert "overhead of a request" in out
    assert "at most 60 us" in out
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are not kept here")
@pytest.mark.usefixtures("small_serving")
def test_serving_on_one_core() -> None:
    for row in (
        serving_bench.Clients("mlp", 3, on_one_core=True),
        serving_bench.Bound("mlp", 3, on_one_core=True),
    ):
        line = row.measure(torch.device("cpu"), 0.01)
        assert line["wrong"] == 0
        assert "on one core" in str(row)
        assert "on one core" in line["model"]


def test_serving_where_no_thread_is_kept_on_a_core() -> None:
    """The preset is there without what keeps them, as on macOS."""
    program = """
import os
for name in ("sched_setaffinity", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
import torch
from orchard.cli import serving_bench
assert serving_bench.exercises(torch.device("cuda")) == serving_bench.EXERCISES
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("small_serving")
def test_serving_with_a_wrong_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows no speed, holds no goal, and the command fails."""

    class Faulty(serving_bench.BatchQueue):
        def submit(self, x: torch.Tensor, **options: Any) -> Any:
            future = super().submit(x, **options)
            future.result().add_(1e-3)
            return future

    monkeypatch.setattr(serving_bench, "BatchQueue", Faulty)
    assert _serving(tmp_path, "--only", "mlp, 32", "--no-plot") == 1
    (line,) = _stored(tmp_path, "serving")
    assert line["naive"]["wrong"] == 0
    assert line["queue"]["wrong"] == line["queue"]["requests"] == line["wrong"]
    assert [goal["held"] for goal in line["goals"]] == [False, False]
    assert f"WRONG, {line['wrong']} answers" in capsys.readouterr().out


@pytest.mark.usefixtures("small_serving")
@pytest.mark.parametrize("option", ["--backend=aten", "--dtype=float16"])
def test_serving_has_its_own_calls(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _serving(tmp_path, option) == 2
    assert "the preset serving has its own calls" in capsys.readouterr().err


def test_goals_of_serving_are_the_device_s_own() -> None:
    keeps = hasattr(os, "sched_setaffinity")
    kept = serving_bench.ON_ONE_CORE if keeps else ()
    anywhere = (*serving_bench.EXERCISES, *kept)
    every = (*anywhere, *serving_bench.ON_A_GPU)
    assert serving_bench.exercises(torch.device("cpu")) == anywhere
    assert serving_bench.exercises(torch.device("cuda")) == (every if keeps else anywhere)
    names = {str(exercise) for exercise in every}
    assert {str(goal.case) for goal in serving_bench.GOALS} <= names
    line = {"case": "mlp, 64 clients", "wrong": 0, "ratio": {"p50": 9.0}}
    assert serving_bench.goals(line, torch.device("cpu")) == []
    (goal,) = serving_bench.goals(line, torch.device("cuda"))
    assert (goal["found"], goal["limit"], goal["held"]) == (9.0, 10, False)
