"""The script that runs everything that needs a GPU, with commands that need none."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cli

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_gpu", ROOT / "benchmarks" / "on_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_steps_name_what_there_is(script: ModuleType, tmp_path: Path) -> None:
    """Every test file exists, every page has the command, and what compiles comes first."""
    found = script.steps(tmp_path)
    assert [step.name for step in found] == [
        *("tests", "conformance", "bench", "memcheck", "racecheck", "serving"),
    ]
    for name in (*script.TESTED, *(each.partition("::")[0] for each in script.SANITIZED)):
        assert (ROOT / name).is_file(), name
    page = (ROOT / "docs" / "cuda.md").read_text()
    for step in found:
        assert f"`{step.name}`" in page
    assert sum(step.limit for step in found) <= 2000


def test_the_sanitized_tests_exist(script: ModuleType) -> None:
    for node in script.SANITIZED:
        path, function = node.split("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / path).read_text()


def _step(script: ModuleType, name: str, code: str, limit: int = 60) -> object:
    return script.Step(name, "", limit, (sys.executable, "-c", code))


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [
        _step(script, "wrong", "print('this is wrong'); raise SystemExit(3)"),
        _step(script, "hangs", "import threading; threading.Event().wait()", limit=1),
        script.Step("absent", "", 60, ("no-such-tool",)),
        _step(script, "right", "print('all is well')"),
    ]
    found = script.run_all(chosen, 60.0, tmp_path / "new")
    assert [(each.step.name, each.status) for each in found] == [
        ("wrong", "exit status 3"),
        ("hangs", "ended after 1 s"),
        ("absent", "no-such-tool is not here"),
        ("right", "ok"),
    ]
    log = (tmp_path / "new" / "log.txt").read_text()
    assert "this is wrong" in log
    assert "$ python -c" in log
    assert "  all is well" in capsys.readouterr().out


def test_the_limit_is_for_all_of_them(script: ModuleType, tmp_path: Path) -> None:
    late = _step(script, "late", "print('too late')")
    (found,) = script.run_all([late], 0.0, tmp_path)
    assert found.status == "no time left"
    assert "too late" not in (tmp_path / "log.txt").read_text()


def test_the_environment_of_a_step(script: ModuleType, tmp_path: Path) -> None:
    code = "import os; raise SystemExit(os.environ['ONE'] != '1')"
    step = script.Step("set", "", 60, (sys.executable, "-c", code), (("ONE", "1"),))
    (found,) = script.run_all([step], 60.0, tmp_path)
    assert found.status == "ok"
    assert step.line.startswith("ONE=1 python -c ")


def test_a_list_of_commands(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--list", f"--out={tmp_path}", "bench"])
    assert script.main() == 0
    shown = capsys.readouterr().out
    assert f"python -m orchard bench --preset cuda --resume --out {tmp_path}" in shown
    assert "memcheck" not in shown
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "benches"])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    assert "'benches' is not one of tests, conformance" in capsys.readouterr().err
