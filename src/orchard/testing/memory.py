"""Peak memory of a step: by torch's own account of what it allocates, or by the system's."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile


def why_no_peak(device: torch.device | str) -> str | None:
    """Why `peak_memory` cannot measure on `device`; None where it can."""
    kind = torch.device(device).type
    if kind in ("cpu", "cuda"):
        return None
    return f"torch keeps no peak of the memory it allocates on {kind}"


def peak_memory(step: Callable[[], object], device: torch.device | str) -> int | None:
    """The most bytes that `step` has allocated at once on top of what was there before.

    None where `why_no_peak` gives a reason. Scratch that a library takes past torch's allocator
    is not seen, and on a CPU neither is the release of what was allocated before the step.
    """
    device = torch.device(device)
    if why_no_peak(device) is not None:
        return None
    return _peak_on_cuda(step, device) if device.type == "cuda" else _peak_on_cpu(step)


def _peak_on_cuda(step: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(step: Callable[[], object]) -> int:
    with (
        _quiet_profiler(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step()
    # The public event list folds allocations into the operators that made them; order matters.
    recorded = profiler.profiler.kineto_results.events()
    changes: list[tuple[int, int]] = [
        (event.start_ns(), event.nbytes())
        for event in recorded
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    changes.sort(key=lambda change: change[0])
    return max(accumulate((size for _, size in changes), initial=0))


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler's library writes its stages to standard error unless its level says not to."""
    name = "KINETO_LOG_LEVEL"
    ours = name not in os.environ
    if ours:
        os.environ[name] = "99"
    try:
        yield
    finally:
        if ours:
            del os.environ[name]


PROCESS = Path("/proc/self")


def resident_growth(step: Callable[[], object]) -> int | None:
    """The most bytes by which `step` made this process larger in memory; None where nobody says.

    Everything counts, whoever allocated it: scratch of a library, stacks, code that is loaded. Of
    memory that was freed before, what the allocator had kept is given back first, where it can be.
    """
    if (PROCESS / "clear_refs").exists():
        _give_back()
        (PROCESS / "clear_refs").write_text("5")  # the peak begins again from what is there now
        before = _status("VmRSS")
        step()
        return max(_status("VmHWM") - before, 0)
    if importlib.util.find_spec("resource") is None:
        return None
    before = _largest_so_far()
    step()
    return _largest_so_far() - before


def resident_bytes() -> int | None:
    """What this process has in memory now; None where nobody says."""
    return _status("VmRSS") if (PROCESS / "status").exists() else None


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    for line in (PROCESS / "status").read_text().splitlines():
        label, _, value = line.partition(":")
        if label == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"{PROCESS / 'status'} has no {name}")


def _largest_so_far() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
