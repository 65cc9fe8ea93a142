"""What only a Mac can tell of the Metal kernels: do they compile, and how fast are they."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from orchard.backends.metal.runtime import MetalRuntime
from orchard.backends.metal.source import THREADS, TYPES, Specialisation, Storage, source
from orchard.dispatch.backend import dtype_name
from orchard.testing import benchmark, presets
from orchard.text import one_line

KERNELS = {
    "forward.metal": ("attention_forward",),
    "decode.metal": ("attention_runs", "attention_join"),
    "backward.metal": (
        "attention_rows",
        "attention_coarse_rows",
        "attention_grad_query",
        "attention_grad_key_value",
        "attention_grad_mask",
    ),
}
STORED = {
    "int8": (Storage(torch.int8, 1),) * 3,
    "int4, asymmetric": (Storage(torch.uint8, 2),) * 3,
    "bf16 query, int8": (Storage(torch.bfloat16), Storage(torch.int8, 1), Storage(torch.int8, 1)),
}
DIMS = ((64, 64), (128, 128), (256, 256), (80, 40), (33, 7))
Step = Callable[[str], None]


def facts() -> dict[str, Any]:
    """The GPU, the system and torch; None for what cannot be found out."""
    return {
        "gpu": _or_none(torch.backends.mps.get_name),
        "gpu_cores": _or_none(torch.backends.mps.get_core_count),
        "gpu_memory_bytes": _or_none(torch.mps.recommended_max_memory),
        "macos": platform.mac_ver()[0] or None,
        "torch": torch.__version__,
    }


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # torch raises what it likes where there is no such GPU
        return None


def samples(*, quick: bool) -> list[tuple[str, str, Specialisation]]:
    """File, kind and specialisation of each source: bare, with everything, and in few bits."""
    return list(_samples(DIMS[:1] if quick else DIMS))


def _samples(dims: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, str, Specialisation]]:
    for file in KERNELS:
        rows = 8 if file == "decode.metal" else 0
        for dtype in TYPES:
            for head_dim, value_dim in dims:
                bare = Specialisation(dtype, head_dim, value_dim, decode_rows=rows)
                yield file, "bare", bare
                everything = bare._replace(
                    mask=torch.float32,
                    band=True,
                    softcap=True,
                    dropout=True,
                    lse=True,
                    packed=head_dim % 4 == value_dim % 4 == 0 and not rows,
                    grad_lse=file == "backward.metal",
                    grad_mask=file == "backward.metal",
                )
                yield file, "everything", everything
                if dtype == torch.float32 and file != "backward.metal":
                    for kind, stored in STORED.items():
                        yield file, kind, everything._replace(stored=stored, smoothed=True)


def compile_all(runtime: MetalRuntime, *, quick: bool, step: Step) -> list[dict[str, Any]]:
    """What came of each kernel, in the compiler's words where it was refused."""
    found = []
    for file, kind, made in samples(quick=quick):
        about = {
            "file": file,
            "kind": kind,
            "dtype": dtype_name(made.dtype),
            "head_dim": made.head_dim,
            "value_dim": made.value_dim,
        }
        start = time.perf_counter()
        library: Any = None
        words = ""
        try:
            with runtime.lock:
                library = runtime.compile(source(file, made))
        except Exception as error:  # a refused kernel is a result
            words = one_line(error, 2000)
        seconds = time.perf_counter() - start
        for name in KERNELS[file]:
            found.append({"kernel": name, **about, **_looked_up(library, name, words)})
            found[-1]["seconds"] = seconds
        step(f"{file} {kind} {about['dtype']} {made.head_dim}")
    return found


def _looked_up(library: Any, name: str, words: str) -> dict[str, Any]:
    """A kernel's limits, which the GPU's compiler sets as it sees the registers it takes."""
    threads = memory = None
    if library is not None:
        try:
            kernel = getattr(library, name)
            threads = kernel.max_threads_per_threadgroup
            memory = kernel.static_thread_group_memory_length
            if threads < THREADS:
                words = f"runs {threads} threads at most, and {THREADS} are launched"
        except Exception as error:  # so is one that has no pipeline
            words = one_line(error, 2000)
    return {
        "ok": not words,
        "words": words,
        "max_threads": threads,
        "threadgroup_bytes": memory,
    }


def cases(device: torch.device) -> list[benchmark.Case]:
    return presets.quick(device, None)


def time_all(
    device: torch.device, backend: str, *, seconds: float, step: Step
) -> list[benchmark.Row]:
    """The preset `quick` beside torch's attention, each row checked first."""
    rows = []
    for case in cases(device):
        rows.append(benchmark.measure(case, device, backend, seconds))
        step(case.name)
    return rows
