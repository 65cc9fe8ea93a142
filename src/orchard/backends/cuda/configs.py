"""Tables of configs: the shipped one, and the user's, which `orchard tune` writes.

family -> kernel -> "half" or "single" -> head block -> config.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from orchard.errors import SettingError
from orchard.text import one_line

Role = Literal["forward", "decode", "join", "rows", "grad_key_value", "grad_query", "grad_mask"]
Size = Literal["half", "single"]
Table = dict[str, dict[str, dict[str, dict[str, list[Any]]]]]

PRECISIONS = ("ieee", "bf16x6")
_WGMMA_ROWS = 64


class Config(NamedTuple):
    """Blocks of rows and keys, warps of a program, stages of its pipeline.

    `precision` is how products of fp32 operands are made: "ieee", or "bf16x6", which splits each
    operand into three bf16 numbers, 24 bits in all, and adds up six products of tensor cores.
    Its blocks stay below the 64 rows of a wgmma product: ptxas 12.8 makes some such kernels read
    descriptors that nothing has written.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    precision: str = "ieee"


class Entry(NamedTuple):
    """Where a table has the config of a problem, below the family of the GPU."""

    role: Role
    size: Size
    head_block: str


@cache
def shipped() -> Table:
    text = files("orchard.backends.cuda").joinpath("tuning.json").read_text()
    table: Table = json.loads(text)
    return table


def user_table() -> Path:
    """Where `orchard tune` keeps what it found."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "orchard" / "cuda-tuning.json"


@cache
def of_the_user() -> Table:
    path = user_table()
    return read(path) if path.is_file() else {}


def lookup(table: Table, family: str, entry: Entry) -> Config | None:
    values = table.get(family, {}).get(entry.role, {}).get(entry.size, {}).get(entry.head_block)
    return None if values is None else Config(*values)


def read(path: Path) -> Table:
    """The table at `path`; SettingError where it is none."""
    try:
        table: Table = json.loads(path.read_text())
        for roles in table.values():
            for role, sizes in roles.items():
                _one_of(role, get_args(Role))
                for size, entries in sizes.items():
                    _one_of(size, get_args(Size))
                    for values in entries.values():
                        _check(Config(*values))
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise SettingError(
            f"{path} is no table of configs ({one_line(error)}); "
            "delete it, or have `orchard tune` write another"
        ) from None
    return table


def _one_of(name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise ValueError(f"{name!r} is not one of {', '.join(names)}")


def takes_wgmma(config: Config) -> bool:
    """Whether bf16x6 would be done by wgmma, as it must not be."""
    return config.precision == "bf16x6" and max(config.rows, config.keys) >= _WGMMA_ROWS


def _check(config: Config) -> None:
    _one_of(config.precision, PRECISIONS)
    if takes_wgmma(config):
        raise ValueError(f"blocks of {list(config)} are not below {_WGMMA_ROWS}, as bf16x6 needs")
    for name, number in config._asdict().items():
        if name != "precision" and (type(number) is not int or number < 1):
            raise ValueError(f"{name} of {list(config)} is not an integer above 0")
        if name in ("rows", "keys", "warps") and number & (number - 1):
            raise ValueError(f"{name} of {list(config)} is not a power of two")


def write(path: Path, family: str, found: Mapping[Entry, Config]) -> None:
    """Add configs of a family to the table at `path`; later plans see it."""
    table = read(path) if path.is_file() else {}
    for entry, config in found.items():
        sizes = table.setdefault(family, {}).setdefault(entry.role, {})
        sizes.setdefault(entry.size, {})[entry.head_block] = list(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(_text(table))
    unfinished.replace(path)
    of_the_user.cache_clear()


def _text(table: Table) -> str:
    """As the shipped table is written: a config to a line."""
    text = json.dumps(table, indent=2)
    return re.sub(r"\[[^]]*]", lambda match: json.dumps(json.loads(match[0])), text) + "\n"
