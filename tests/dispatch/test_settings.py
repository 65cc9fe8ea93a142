"""The ORCHARD_* variables: what they may hold, and that each takes effect."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch

import orchard
from orchard.dispatch import planner as plans
from orchard.dispatch import settings
from orchard.dispatch.planner import Planner
from orchard.dispatch.settings import Settings, read

pytestmark = [pytest.mark.dispatch]

Use = Callable[..., Planner]


READ: list[tuple[dict[str, str], Settings]] = [
    ({}, Settings()),
    ({"ORCHARD_BACKEND": "aten"}, Settings(backend="aten")),
    ({"ORCHARD_DISABLE": "aten"}, Settings(disabled=frozenset({"aten"}))),
    ({"ORCHARD_DISABLE": " a, b ,,a"}, Settings(disabled=frozenset({"a", "b"}))),
    ({"ORCHARD_ON_ERROR": "raise"}, Settings(on_error="raise")),
    ({"ORCHARD_ON_ERROR": "fallback"}, Settings(on_error="fallback")),
    ({"ORCHARD_LOG": "info"}, Settings(log="info")),
    ({"ORCHARD_LOG": "DEBUG"}, Settings(log="debug")),
    ({"ORCHARD_DEBUG_FLASHATN": "1"}, Settings(log="debug")),
    ({"ORCHARD_DEBUG_FLASHATN": "0"}, Settings()),
    ({"ORCHARD_DEBUG_FLASHATN": "1", "ORCHARD_LOG": "error"}, Settings(log="error")),
    ({"ORCHARD_NUM_THREADS": "3"}, Settings(num_threads=3)),
    *(({"ORCHARD_CPU_ISA": name}, Settings(cpu_isa=name)) for name in settings.CPU_ISAS),
    ({"HOME": "/", "ORCHARDS": "many"}, Settings()),
]


def spelled(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items()) or "none"


@pytest.mark.parametrize(
    ("environ", "expected"), READ, ids=[spelled(environ) for environ, _ in READ]
)
def test_read(environ: dict[str, str], expected: Settings) -> None:
    """Each variable is read into its setting and touches no other."""
    assert read(environ) == expected


def test_empty_is_unset() -> None:
    """A variable that is set to nothing counts as not set."""
    assert read(dict.fromkeys(settings.VARIABLES, "")) == Settings()


INVALID = [
    ("ORCHARD_ON_ERROR", "maybe", ("fallback", "raise")),
    ("ORCHARD_LOG", "loud", ("debug", "info", "warning", "error", "critical")),
    ("ORCHARD_NUM_THREADS", "0", ("positive integer",)),
    ("ORCHARD_NUM_THREADS", "-2", ("positive integer",)),
    ("ORCHARD_NUM_THREADS", "1.5", ("positive integer",)),
    ("ORCHARD_NUM_THREADS", "two", ("positive integer",)),
    ("ORCHARD_CPU_ISA", "avx9", ("avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "portable")),
    ("ORCHARD_CPU_ISA", "AVX2", ("avx2",)),
    ("ORCHARD_BACKEND", "flash9", ("auto", "aten", "reference")),
    ("ORCHARD_DISABLE", "aten,flash9", ("aten", "reference")),
]


@pytest.mark.parametrize(
    ("name", "value", "allowed"), INVALID, ids=[f"{name}={value}" for name, value, _ in INVALID]
)
def test_invalid_value(environment: Use, name: str, value: str, allowed: tuple[str, ...]) -> None:
    """A value that is not allowed raises SettingError with the variable, the value and what is."""
    with pytest.raises(orchard.SettingError) as caught:
        environment(**{name: value})
    text = str(caught.value)
    others = {other for other, _, _ in INVALID} - {name}
    assert name in text
    assert repr(value.split(",")[-1]) in text
    assert [word for word in allowed if word not in text] == []
    assert [other for other in others if other in text] == []


def test_setting_error_is_a_value_error() -> None:
    """SettingError is both an OrchardError and a ValueError."""
    assert issubclass(orchard.SettingError, orchard.OrchardError)
    assert issubclass(orchard.SettingError, ValueError)


def test_reset_reads_again(environment: Use) -> None:
    """planner.reset() makes a changed environment count; until then nothing changes."""
    environment()
    operand = torch.randn(1, 2, 8, 16)
    assert orchard.explain(operand, operand, operand).backend == "aten"
    assert settings.current() == Settings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHARD_DISABLE", "aten")
        assert orchard.explain(operand, operand, operand).backend == "aten"
        plans.reset()
        assert orchard.explain(operand, operand, operand).backend == "reference"
        assert settings.current().disabled == {"aten"}


def test_a_bad_variable_keeps_the_planner_that_works(environment: Use) -> None:
    """A reset that fails leaves the planner that was there."""
    good = environment()
    with pytest.raises(orchard.SettingError):
        environment(ORCHARD_ON_ERROR="maybe")
    assert plans.planner() is good


@pytest.mark.parametrize(
    "variables", [{"ORCHARD_LOG": "debug"}, {"ORCHARD_DEBUG_FLASHATN": "1"}], ids=spelled
)
def test_log_holds_each_plan_once(environment: Use, variables: dict[str, str]) -> None:
    """At level debug every new plan is logged as explain() prints it, and a cached one is not."""
    environment(**variables)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    settings.logger.addHandler(handler)
    operand = torch.randn(1, 2, 8, 16)
    for _ in range(3):
        orchard.attention(operand, operand, operand)
    assert [record.levelname for record in records] == ["DEBUG"]
    assert records[0].getMessage() == str(orchard.explain(operand, operand, operand))


def test_log_stops_when_the_variable_is_gone(environment: Use) -> None:
    """Without ORCHARD_LOG a reset returns the logger to what it was."""
    level, handlers = settings.logger.level, list(settings.logger.handlers)
    environment(ORCHARD_LOG="debug")
    assert settings.logger.level == logging.DEBUG
    assert len(settings.logger.handlers) == len(handlers) + 1
    environment(ORCHARD_LOG="info")
    assert settings.logger.level == logging.INFO
    assert len(settings.logger.handlers) == len(handlers) + 1
    environment()
    assert settings.logger.level == level
    assert settings.logger.handlers == handlers


# Each variable in a process of its own


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if "ORCHARD_" not in name}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


CALL = """
    import sys
    import torch, orchard
    backends = sys.modules["orchard.backends"]
    backends.REGISTRY = (
        "orchard.backends.aten:AtenBackend", "orchard.backends.reference:ReferenceBackend"
    )
    x = torch.randn(1, 2, 8, 16)
    try:
        orchard.attention(x, x, x)
    except orchard.OrchardError as error:
        print(type(error).__name__, error)
    print(orchard.stats()["calls"])
"""


@pytest.mark.parametrize(
    ("variables", "printed"),
    [
        ({"ORCHARD_BACKEND": "reference"}, "{'forward': {'reference': 1}}"),
        ({"ORCHARD_DISABLE": "aten"}, "{'forward': {'reference': 1}}"),
        ({"ORCHARD_DISABLE": "aten,reference"}, "NotServedError"),
        ({"ORCHARD_ON_ERROR": "maybe"}, "SettingError ORCHARD_ON_ERROR is 'maybe'"),
    ],
    ids=lambda value: spelled(value) if isinstance(value, dict) else "",
)
def test_fresh_process_chooses(variables: dict[str, str], printed: str) -> None:
    """In a new process the variable decides who serves, or raises at the first call."""
    done = run(CALL, **variables)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("variable", ["ORCHARD_LOG=debug", "ORCHARD_DEBUG_FLASHATN=1"])
def test_fresh_process_logs(variable: str) -> None:
    """In a new process the plan is written to standard error, the call is served as ever."""
    name, _, value = variable.partition("=")
    done = run(CALL, **{name: value})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'forward': {'aten': 1}}\n"
    assert "orchard DEBUG: forward on cpu: served by aten (cpu-flash)" in done.stderr


FAILING = """
    import sys, warnings
    import torch, orchard
    from orchard.backends.aten import AtenBackend
    backends = sys.modules["orchard.backends"]
    backends.REGISTRY = (
        "orchard.backends.aten:AtenBackend", "orchard.backends.reference:ReferenceBackend"
    )
    x = torch.randn(1, 2, 8, 16)
    orchard.attention(x, x, x)
    def broken(*_):
        raise RuntimeError("kernel is broken")
    AtenBackend.forward = broken
    try:
        with warnings.catch_warnings(record=True) as caught:
            orchard.attention(x, x, x)
        print("served after", [w.category.__name__ for w in caught])
    except RuntimeError as error:
        print("raised", error)
    print(orchard.stats()["calls"])
"""


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        pytest.param(
            "fallback",
            "served after ['FallbackWarning']\n{'forward': {'aten': 1, 'reference': 1}}\n",
            id="fallback",
        ),
        pytest.param("raise", "raised kernel is broken\n{'forward': {'aten': 1}}\n", id="raise"),
    ],
)
def test_fresh_process_on_error(value: str, printed: str) -> None:
    """In a new process ORCHARD_ON_ERROR decides whether a failing kernel is replaced."""
    done = run(FAILING, ORCHARD_ON_ERROR=value)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_fresh_process_num_threads() -> None:
    """In a new process ORCHARD_NUM_THREADS is what the settings say."""
    script = "from orchard.dispatch import settings; print(settings.current().num_threads)"
    assert run(script, ORCHARD_NUM_THREADS="3").stdout == "3\n"
