"""A package `metal_sdpa_extension` that is this drop-in, written into an environment or removed."""

from __future__ import annotations

import argparse
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "metal_sdpa_extension"
_MARK = "# Written by orchard.integrations.metal_sdpa_extension --install-shim."
_SOURCE = f"""{_MARK}
import sys

from orchard.integrations import {PACKAGE}

sys.modules[__name__] = {PACKAGE}
"""


def install(target: Path) -> Path:
    """Write the package under `target`; another package of that name is left alone."""
    package = target / PACKAGE
    if package.exists() and not _is_ours(package):
        raise FileExistsError(f"{package} is another package; uninstall it first")
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_SOURCE)
    return package


def remove(target: Path) -> Path:
    """Remove what `install` wrote, and nothing else."""
    package = target / PACKAGE
    if not package.exists():
        raise FileNotFoundError(f"{package} does not exist; there is nothing to remove")
    if not _is_ours(package):
        raise FileExistsError(f"{package} is another package; it was not written by --install-shim")
    shutil.rmtree(package)
    return package


def _is_ours(package: Path) -> bool:
    init = package / "__init__.py"
    return init.is_file() and init.read_text().startswith(_MARK)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m orchard.integrations.{PACKAGE}",
        description=f"Have `import {PACKAGE}` find Orchard's drop-in in this environment.",
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--install-shim", action="store_true", help="write the package")
    action.add_argument("--remove-shim", action="store_true", help="remove it again")
    parser.add_argument(
        "--target",
        type=Path,
        default=Path(sysconfig.get_paths()["purelib"]),
        help="folder to write to (default: the environment's site-packages)",
    )
    asked = parser.parse_args(argv)
    try:
        if asked.install_shim:
            print(f"wrote {install(asked.target)}")
        else:
            print(f"removed {remove(asked.target)}")
    except OSError as error:
        parser.exit(1, f"{error}\n")
    return 0
