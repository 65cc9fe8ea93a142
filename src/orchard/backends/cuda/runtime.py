"""Compiling and launching kernels: Triton's part, which is imported when it is first needed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from orchard.backends.cuda.variant import Numbers, Strides, Variant
from orchard.text import one_line

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.bool: "*i8",
}
_NUMBERS = Numbers(*("i32",) * 8, *("fp32",) * 4)
_HERE = nullcontext()  # the device is the current one already
_ALIGNMENT = 16  # bytes, and the most elements that the divisor of a stride is looked for


class KernelError(RuntimeError):
    """A kernel did not compile, or does not fit this GPU."""


class Gpu(NamedTuple):
    architecture: int  # 90 for compute capability 9.0
    processors: int
    shared_memory: int  # bytes of a multiprocessor

    @property
    def family(self) -> str:
        return f"sm_{self.architecture}"


class Layout(NamedTuple):
    """What a kernel may rely on in the strides of a tensor."""

    unit: str  # the axis whose stride is 1: "row", "column" or none
    divisor: int  # of every other stride

    @staticmethod
    def of(strides: Strides) -> Layout:
        unit = "column" if strides.column == 1 else "row" if strides.row == 1 else ""
        others = (value for axis, value in strides._asdict().items() if axis != unit)
        return Layout(unit, math.gcd(_ALIGNMENT, *others))


class Specialisation(NamedTuple):
    """Everything that a compiled kernel depends on, but for its pointers."""

    kernel: str  # "module.function"
    layouts: tuple[Layout, ...]
    integers: int  # further arguments
    variant: Variant
    warps: int
    stages: int


class Pointers(NamedTuple):
    dtypes: tuple[torch.dtype | None, ...]  # None: the tensor is not there
    aligned: bool


Launch = Callable[..., None]


class Step:
    """One kernel of a plan: what is compiled, and the arguments that every call repeats."""

    __slots__ = ("arguments", "device", "loaded", "programs", "specialisation")

    def __init__(
        self,
        kernel: str,
        strides: Sequence[Strides],
        numbers: Numbers,
        variant: Variant,
        *,
        integers: Sequence[int] = (),
        programs: int,
        warps: int,
        stages: int,
        device: torch.device,
    ) -> None:
        self.specialisation = Specialisation(
            kernel,
            tuple(map(Layout.of, strides)),
            len(integers),
            variant,
            warps,
            stages,
        )
        self.arguments = (*strides, numbers, *integers, variant)
        self.programs = programs
        self.device = device
        self.loaded: dict[bool, Launch] = {}  # by whether all pointers are aligned


class Runtime(Protocol):
    """Where kernels run."""

    def gpu(self, device: torch.device) -> Gpu: ...

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """While this lasts the device is the current one."""

    def launch(self, step: Step, *tensors: Tensor | None) -> None: ...


class TritonRuntime:
    """Triton, on the current stream of each tensor's device. Kernels are compiled once, under a
    lock; launches take none."""

    def __init__(self) -> None:
        import triton

        self._stream = triton.runtime.driver.active.get_current_stream
        self._lock = threading.Lock()
        self._kernels: dict[tuple[Specialisation, Pointers, torch.device], Any] = {}

    def gpu(self, device: torch.device) -> Gpu:
        properties = torch.cuda.get_device_properties(device)
        architecture = 10 * properties.major + properties.minor
        return Gpu(
            architecture,
            properties.multi_processor_count,
            properties.shared_memory_per_multiprocessor,
        )

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.index == torch._C._cuda_getDevice():
            return _HERE
        return torch.cuda.device(device)

    def launch(self, step: Step, *tensors: Tensor | None) -> None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        folded = 0
        for address in addresses:
            folded |= address
        aligned = folded % _ALIGNMENT == 0
        launch = step.loaded.get(aligned) or self._load(step, tensors, aligned)
        launch(*addresses, *step.arguments, stream=self._stream(step.device.index))

    def _load(self, step: Step, tensors: Sequence[Tensor | None], aligned: bool) -> Launch:
        pointers = pointers_of(tensors, aligned)
        key = (step.specialisation, pointers, step.device)
        with self._lock:
            kernel = self._kernels.get(key)
            if kernel is None:
                kernel = self._kernels[key] = self._compile(*key)
        if isinstance(kernel, KernelError):
            raise KernelError(*kernel.args)
        launch: Launch = kernel[step.programs, 1, 1]
        step.loaded[aligned] = launch
        return launch

    def _compile(
        self, specialisation: Specialisation, pointers: Pointers, device: torch.device
    ) -> Any:
        """The kernel, on the current device, or the error, which is not to be met a second time."""
        try:
            kernel = compiled(specialisation, pointers, self.gpu(device).architecture)
            kernel[1, 1, 1]  # loads it
        except Exception as error:  # any of the compiler's; it becomes a reason
            return KernelError(f"{specialisation.kernel} does not compile: {one_line(error, 2000)}")
        return kernel


def pointers_of(tensors: Sequence[Tensor | None], aligned: bool) -> Pointers:
    return Pointers(tuple(None if t is None else t.dtype for t in tensors), aligned)


def kernel_of(specialisation: Specialisation) -> Any:
    """The function that Triton compiles."""
    module, _, function = specialisation.kernel.partition(".")
    return getattr(import_module(f"orchard.backends.cuda.{module}"), function)


def compiled(specialisation: Specialisation, pointers: Pointers, architecture: int) -> Any:
    """A kernel for a GPU of this architecture, which need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernel_of(specialisation)
    return triton.compile(
        ASTSource(kernel, *_signature(specialisation, pointers, kernel.arg_names)),
        target=GPUTarget("cuda", architecture, 32),
        options={
            "num_warps": specialisation.warps,
            "num_stages": specialisation.stages,
            "launch_pdl": specialisation.variant.early,
        },
    )


def _signature(
    specialisation: Specialisation, pointers: Pointers, names: Sequence[str]
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Types by name; constants and facts by place, which for a stride has two indices."""
    types: list[Any] = []
    constants: dict[tuple[int, ...], Any] = {}
    facts: dict[tuple[int, ...], Any] = {}
    for dtype in pointers.dtypes:
        if dtype is None:
            constants[len(types),] = None
        elif pointers.aligned:
            facts[len(types),] = [["tt.divisibility", _ALIGNMENT]]
        types.append("constexpr" if dtype is None else _POINTERS[dtype])
    for layout in specialisation.layouts:
        strides = Strides(*("i64",) * 4)
        for axis, name in enumerate(Strides._fields):
            if name == layout.unit:
                strides = strides._replace(**{name: "constexpr"})
                constants[len(types), axis] = 1
            elif layout.divisor > 1:
                facts[len(types), axis] = [["tt.divisibility", layout.divisor]]
        types.append(strides)
    types += [_NUMBERS, *("i32",) * specialisation.integers]
    constants[len(types),] = specialisation.variant
    types.append("constexpr")
    return dict(zip(names, types, strict=True)), constants, facts
