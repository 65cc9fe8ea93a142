"""The ORCHARD_* environment variables, read once and checked."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchard.errors import SettingError

VARIABLES = (
    "ORCHARD_BACKEND",
    "ORCHARD_DISABLE",
    "ORCHARD_ON_ERROR",
    "ORCHARD_LOG",
    "ORCHARD_DEBUG_FLASHATN",
    "ORCHARD_NUM_THREADS",
    "ORCHARD_CPU_ISA",
)
CPU_ISAS = ("avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "portable")
logger = logging.getLogger("orchard")
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("orchard %(levelname)s: %(message)s"))
_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class Settings:
    backend: str = "auto"
    disabled: frozenset[str] = frozenset()
    on_error: Literal["fallback", "raise"] = "fallback"
    log: str | None = None
    num_threads: int | None = None
    cpu_isa: str | None = None


def read(environ: Mapping[str, str]) -> Settings:
    """Settings from an environment; an empty variable counts as unset."""
    on_error = environ.get("ORCHARD_ON_ERROR") or "fallback"
    if on_error not in ("fallback", "raise"):
        raise SettingError(f"ORCHARD_ON_ERROR is {on_error!r}; it must be 'fallback' or 'raise'")
    log: str | None = (environ.get("ORCHARD_LOG") or "").lower() or None
    if log is None and environ.get("ORCHARD_DEBUG_FLASHATN") == "1":
        log = "debug"
    if log is not None and log not in _LEVELS:
        raise SettingError(f"ORCHARD_LOG is {log!r}; it must be one of {', '.join(_LEVELS)}")
    threads = environ.get("ORCHARD_NUM_THREADS") or None
    if threads is not None and not (threads.isdecimal() and int(threads) > 0):
        raise SettingError(f"ORCHARD_NUM_THREADS is {threads!r}; it must be a positive integer")
    isa = environ.get("ORCHARD_CPU_ISA") or None
    if isa is not None and isa not in CPU_ISAS:
        raise SettingError(f"ORCHARD_CPU_ISA is {isa!r}; it must be one of {', '.join(CPU_ISAS)}")
    names = (name.strip() for name in environ.get("ORCHARD_DISABLE", "").split(","))
    return Settings(
        backend=environ.get("ORCHARD_BACKEND") or "auto",
        disabled=frozenset(name for name in names if name),
        on_error="raise" if on_error == "raise" else "fallback",
        log=log,
        num_threads=None if threads is None else int(threads),
        cpu_isa=isa,
    )


_current: Settings | None = None


def current() -> Settings:
    """The process's settings, read from the environment at the first call."""
    return _current if _current is not None else reload()


def reload() -> Settings:
    """Read the environment again; call it before the planner that should see the change."""
    global _current
    _current = read(os.environ)
    if _current.log is not None:
        logger.addHandler(_handler)
        logger.setLevel(_current.log.upper())
    elif _handler in logger.handlers:
        logger.removeHandler(_handler)
        logger.setLevel(logging.NOTSET)
    return _current
