"""The machine and the versions that a measurement belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

import orchard


def machine(device: torch.device) -> dict[str, str | int | float | None]:
    """What has to be known to read a number that was measured on `device` just now."""
    return {
        "device": device.type,
        "cpu": cpu_name(),
        "gpu": gpu_name(device),
        "gpu_family": gpu_family(device),
        "driver": driver(device),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "orchard": orchard.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    """The processor as its vendor calls it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            label, _, name = line.partition(":")
            if label.strip() == "model name":
                return name.strip()
    brand = _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return brand or platform.processor() or platform.machine()


def gpu_name(device: torch.device) -> str | None:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return cpu_name() if device.type == "mps" else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpu_family(device: torch.device) -> str | None:
    """As the tables of the cuda backend call it."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def driver(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    said = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return said.splitlines()[0] if said else None


def commit() -> str | None:
    """The commit of a source checkout, marked where files differ from it; None elsewhere."""
    here = Path(orchard.__file__).parent
    git = ["git", "-C", str(here)]
    # A package inside somebody else's repository has a commit that says nothing about it.
    if _output([*git, "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None
    return _output([*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
