"""Finds clang, and builds shared libraries that are kept by the hash of what went into them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

Mode = Literal["checked", "fast", "flat"]

OLDEST = 17  # the first with bfloat arithmetic
NEWEST = 30  # of the versioned names that are looked for
HERE = Path(__file__).parent
TORCH_HEADERS = Path(torch.__file__).parent / "include"
METAL_HEADERS = shlex.split(
    "metal_algorithm metal_array metal_atomic metal_common metal_compute metal_config"
    " metal_integer metal_limits metal_math metal_matrix metal_numeric metal_packed"
    " metal_pack metal_relational metal_simdgroup metal_simdgroup_matrix metal_stdlib"
    " metal_type_traits metal_types metal_utility metal_geometric"
)

_KERNEL_FLAGS = shlex.split(
    "-x c++ -std=c++20 -O1 -fPIC -ffreestanding -nostdinc -fvisibility=hidden -fno-exceptions"
    " -fno-rtti -fno-builtin -fno-math-errno -ffp-contract=off -fno-lax-vector-conversions"
    " -fno-vectorize -fno-slp-vectorize -fno-caret-diagnostics -ferror-limit=20"
    " -Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none"
    " -Wno-everything -Werror=frame-larger-than -Wframe-larger-than=196608"
)
_PREPROCESS_FLAGS = shlex.split(
    "-x c++ -std=c++17 -E -nostdinc -undef -w -fno-caret-diagnostics"
    " -D__METAL__ -D__METAL_MACOS__ -D__METAL_VERSION__=400"
)
_MODE_FLAGS: dict[Mode, list[str]] = {
    "checked": [
        "-fsanitize-coverage=func,trace-loads,trace-stores",
        "-ftrivial-auto-var-init=pattern",  # NaN in registers that nothing was written to
    ],
    "fast": [],
    "flat": [
        "-DEMU_FLAT",
        "-fsanitize-coverage=func,trace-loads,trace-stores",
        "-fsanitize=undefined",
        "-fno-sanitize=vptr,function",
        "-fno-sanitize-recover=all",
        "-fsanitize-minimal-runtime",
    ],
}
_RUNTIME_FLAGS = shlex.split(
    "-x c -std=c17 -O2 -fPIC -ffreestanding -nostdinc -fvisibility=hidden -ffp-contract=fast"
)


class NoCompilerError(RuntimeError):
    """There is no clang that can compile kernels."""


class CompileError(Exception):
    """The compiler's words."""


@dataclass(frozen=True)
class Toolchain:
    """Commands that compile and link."""

    clang: tuple[str, ...]
    linker: tuple[str, ...]
    version: str


@functools.cache
def find() -> Toolchain:
    """A clang of the system that is recent enough, else the one in the ziglang package."""
    names = ["clang++", *(f"clang++-{n}" for n in range(NEWEST, OLDEST - 1, -1))]
    for path in filter(None, map(shutil.which, names)):
        version = _version((path,))
        if version is not None and int(version.split(".")[0]) >= OLDEST:
            link = ("-dynamiclib", "-undefined", "dynamic_lookup")
            flags = link if sys.platform == "darwin" else ("-shared", "-nostdlib")
            return Toolchain((path,), (path, *flags), f"{path} {version}")
    if importlib.util.find_spec("ziglang") is not None:
        # Not `zig c++`, which has defaults of its own, but the clang and lld within.
        zig = (sys.executable, "-m", "ziglang")
        version = _version((*zig, "clang"))
        if version is not None:
            return Toolchain((*zig, "clang"), (*zig, "ld.lld", "-shared"), f"ziglang {version}")
    raise NoCompilerError(
        f"no clang++ of version {OLDEST} or later on PATH, and no ziglang package:"
        " pip install ziglang, or orchard-attention[metal-emulator]"
    )


def preprocess(source: str) -> str:
    """Macros expanded and torch's headers included; Metal's own words stay as they are."""
    folders = [f"-I{_stubs()}", f"-I{TORCH_HEADERS}"]
    command = [*find().clang, *_PREPROCESS_FLAGS, *folders, "-"]
    return _run(command, source).replace('"<stdin>"', '"program_source"')


def build(source: str, mode: Mode) -> Path:
    """A shared library of a rewritten source and the runtime."""
    toolchain = find()
    flags = [*_KERNEL_FLAGS, *_MODE_FLAGS[mode], *_target()]
    content = "\0".join([source, _sources(), toolchain.version, *flags, *_RUNTIME_FLAGS])
    target = cache() / f"kernel-{hashlib.sha256(content.encode()).hexdigest()[:32]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        shim = ["-include", str(HERE / "shim.h")]
        _run([*toolchain.clang, *flags, *shim, "-c", "-", "-o", str(compiled)], source)
        _run([*toolchain.linker, str(compiled), str(_runtime()), "-o", str(linked)])
        linked.replace(target)
    return target


def load(library: Path) -> ctypes.CDLL:
    if sys.platform.startswith("linux"):
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)  # kernels call it, and name no library
    return ctypes.CDLL(str(library))


@functools.cache
def cache() -> Path:
    """The folder for builds; where the user's cannot be written, one in the temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    folder = (Path(base) if base else home) / "orchard" / "metal-emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        user = os.getuid() if hasattr(os, "getuid") else "user"
        folder = Path(tempfile.gettempdir(), f"orchard-metal-emulator-{user}")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


@functools.cache
def _runtime() -> Path:
    toolchain = find()
    flags = [*_RUNTIME_FLAGS, *_target()]
    content = "\0".join([_sources(), toolchain.version, *flags])
    target = cache() / f"runtime-{hashlib.sha256(content.encode()).hexdigest()[:32]}.o"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            compiled = Path(folder, "runtime.o")
            source = str(HERE / "runtime.c")
            _run([*toolchain.clang, *flags, "-c", source, "-o", str(compiled)])
            compiled.replace(target)
    return target


@functools.cache
def _sources() -> str:
    return "\0".join((HERE / name).read_text() for name in ("runtime.c", "runtime.h", "shim.h"))


@functools.cache
def _stubs() -> Path:
    """Empty headers in the place of Metal's, whose names must survive the preprocessor."""
    folder = cache() / "headers"
    folder.mkdir(exist_ok=True)
    for name in METAL_HEADERS:
        (folder / name).touch()
    return folder


def _target() -> list[str]:
    """x86-64-v3 for its half conversions and fma; others have them anyway."""
    return ["-march=x86-64-v3"] if platform.machine().lower() in ("x86_64", "amd64") else []


def _version(clang: Sequence[str]) -> str | None:
    try:
        answer = _run([*clang, "--version"])
    except (CompileError, OSError):
        return None
    found = re.search(r"version (\d+\.\d+)", answer)
    return found[1] if found else None


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(done.stderr.strip() or f"{command[0]} failed")
    return done.stdout
