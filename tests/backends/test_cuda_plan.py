"""The Python around the Triton kernels: what is planned, packed and kept, on a fake runtime."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.attention.problem import (
    Band,
    Gradients,
    MaskSpec,
    Options,
    Problem,
    Saved,
    Tensors,
    Upstream,
    allows_tf32,
    describe,
)
from orchard.backends.cuda import CudaBackend, choice, configs, runtime, tuning
from orchard.backends.cuda.configs import Config
from orchard.backends.cuda.launch import Setting, plan_decode
from orchard.backends.cuda.runtime import Gpu, KernelError, Layout, Step, TritonRuntime
from orchard.backends.cuda.variant import Numbers, Strides

pytestmark = pytest.mark.dispatch

SOURCES = Path(runtime.__file__).parent
PLAIN = Options(0.25)
H200 = Gpu(90, 132, 228 * 1024)
EVERYTHING = Options(0.25, 3.0, Band(-9, 5), 6000)


class FakeRuntime:
    """In the place of Triton and a GPU: records what it is asked to do, and does nothing."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        self.found = gpu or H200
        self.calls: list[tuple[Step, tuple[Tensor | None, ...]]] = []
        self.current: list[torch.device] = []

    def gpu(self, device: torch.device) -> Gpu:
        return self.found

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.current.append(device)
        yield
        self.current.pop()

    def launch(self, step: Step, *tensors: Tensor | None) -> None:
        assert self.current == [step.device]
        self.calls.append((step, tensors))

    def names(self) -> list[str]:
        return [step.specialisation.kernel.partition(".")[2] for step, _ in self.calls]


def operands(rows: int = 300, keys: int = 400, dim: int = 24, value_dim: int = 12) -> Tensors:
    return Tensors(
        torch.randn(2, 4, rows, dim),
        torch.randn(2, 2, keys, dim),
        torch.randn(2, 2, keys, value_dim),
        None,
        torch.zeros(2, dtype=torch.int32),
    )


def strided(tensor: Tensor) -> Tensor:
    """The same values, every second element of the memory."""
    return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]


def on_gpu(problem: Problem) -> Problem:
    return problem._replace(device=torch.device("cuda", 0))


def kernel_for(tensors: Tensors, options: Options = PLAIN, **kind: Any) -> str | None:
    """Of the backend whose probe has passed."""
    return kernel_of(describe(tensors, options, **kind))


def kernel_of(problem: Problem) -> str | None:
    backend = CudaBackend(FakeRuntime())
    backend.unavailable = lambda *_: None
    capability, _ = backend.select(on_gpu(problem))
    return capability.kernel if capability else None


def run(
    backend: CudaBackend,
    tensors: Tensors,
    options: Options = PLAIN,
    kernel: str = "tiled",
    *,
    mask_grad: bool = False,
    grad_lse: bool = False,
) -> tuple[Saved, Gradients]:
    ahead = describe(tensors, options, grad=True, mask_grad=mask_grad)
    saved = backend.forward(ahead, kernel, tensors)
    upstream = Upstream(
        torch.ones_like(saved.out), torch.ones_like(saved.lse) if grad_lse else None
    )
    back = describe(
        tensors,
        options,
        stage="backward",
        grad_out=upstream.out,
        lse=grad_lse,
        grad=True,
        mask_grad=mask_grad,
    )
    kernel = "tiled" if kernel == "decode" else kernel
    return saved, backend.backward(back, kernel, tensors, saved, upstream)


@pytest.mark.parametrize("kernel", ["tiled", "decode", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)], ids=str)
def test_a_repeated_call_lies_in_memory_as_the_query(
    kernel: str, dtype: torch.dtype, order: tuple[int, ...]
) -> None:
    shape = (2, 4, 8 if kernel == "decode" else 300, 16)
    query = torch.zeros([*(shape[axis] for axis in order), 2], dtype=dtype)[..., 0]
    query = query.permute([order.index(axis) for axis in range(4)])
    key = torch.zeros((2, 4, 40, 16), dtype=dtype)
    tensors = Tensors(query, key, key)
    described = describe(tensors, PLAIN)
    found = CudaBackend(FakeRuntime()).prepare(described, kernel)(tensors)
    assert found.out.stride() == described.out_strides


# Who serves


def test_kernels_by_problem() -> None:
    """Few rows are a decode, operands without runs of elements are packed, the rest is tiled where
    no kernel for Hopper takes it."""
    assert kernel_for(operands()) == "hopper_fp32"
    assert kernel_for(operands(dim=129)) == "tiled"
    assert kernel_for(operands(rows=8)) == "decode"
    assert kernel_for(operands(rows=9)) == "hopper_fp32"
    masked = operands()._replace(mask=torch.ones(1, 1, 300, 400).bool())
    assert kernel_for(masked) == "hopper_fp32"
    assert kernel_for(masked._replace(mask=torch.zeros(1, 1, 300, 400))) == "tiled"
    assert kernel_for(operands(), Options(0.25, softcap=3.0)) == "tiled"
    half = Tensors(*(tensor.half() for tensor in operands(rows=32)[:3]))
    assert kernel_for(half) == "decode"
    assert kernel_for(half._replace(query=torch.randn(2, 4, 33, 24).half())) == "tiled"  # Dv 12
    tensors = operands()
    assert kernel_for(tensors._replace(key=strided(tensors.key))) == "packed"
    transposed = tensors.key.transpose(2, 3).contiguous().transpose(2, 3)
    assert kernel_for(tensors._replace(key=transposed)) == "tiled"
    few = operands(rows=100)
    assert kernel_for(few._replace(key=strided(few.key))) == "tiled"
    assert kernel_for(operands(rows=1), grad=True, stage="backward", grad_out=few.query) == "tiled"


@pytest.mark.parametrize(
    ("tensors", "options", "code"),
    [
        (operands(dim=257), PLAIN, "head_dim"),
        (operands(value_dim=300), PLAIN, "head_dim"),
        (
            Tensors(*(torch.empty(1, 1, 2, 4, dtype=torch.float64) for _ in range(3))),
            PLAIN,
            "dtype",
        ),
        (operands()._replace(mask=torch.zeros(1, 1, 1, 1).double()), PLAIN, "mask_dtype"),
        (operands(), Options(1.0, softcap=1e-40), "softcap"),
        (operands(), Options(1e30, softcap=1e-20), "softcap"),
        (Tensors(*(torch.empty(1).expand(1, 1, 2**30, 1) for _ in range(3))), PLAIN, "size"),
        (Tensors(*(torch.empty(1).expand(2**15, 2**15, 33, 1) for _ in range(3))), PLAIN, "size"),
    ],
)
def test_reasons(tensors: Tensors, options: Options, code: str) -> None:
    """What the kernels cannot serve has a reason, in every one that serves such problems."""
    problem = on_gpu(describe(tensors, options))
    backend = CudaBackend(FakeRuntime())
    chosen, reasons = backend.select(problem)
    assert chosen is None
    said = {reason.sentence.partition(":")[0] for reason in reasons if reason.code == code}
    assert said >= {"decode", "packed", "tiled"}


@pytest.mark.parametrize(
    ("role", "dim", "threshold", "hidden", "blocks"),
    [
        ("grad_query", 128, 6000, True, (16, 32)),  # (32, 16), by tensor cores
        ("grad_query", 128, 0, True, (32, 16)),
        ("grad_query", 128, 6000, False, (32, 16)),
        ("grad_query", 64, 6000, True, (32, 32)),
        ("grad_query", 256, 6000, True, (16, 16)),  # not by tensor cores
        ("grad_key_value", 64, 6000, True, (32, 32)),
        ("rows", 256, 6000, True, (16, 16)),
    ],
)
def test_weights_are_multiplied_deep_enough(
    role: configs.Role, dim: int, threshold: int, hidden: bool, blocks: tuple[int, int]
) -> None:
    """With a bool mask and dropout Triton's layout of these products is 32 deep."""
    problem = chosen(dim, threshold, hidden)
    assert tuning.config(problem, H200, role)[:2] == blocks


def chosen(dim: int, threshold: int = 6000, hidden: bool = True) -> Problem:
    """Weights chosen by a mask, if it is bool, and by dropout, if there is any."""
    mask = torch.ones(1, 1, 300, 400)
    tensors = operands(dim=dim)._replace(mask=mask.bool() if hidden else mask)
    return describe(tensors, Options(0.25, threshold=threshold))


@pytest.mark.parametrize(
    ("role", "given", "blocks"),
    [
        ("grad_key_value", Config(16, 32, 4, 1, "bf16x6"), (32, 16)),
        ("grad_key_value", Config(16, 32, 4, 1), (16, 32)),
        ("decode", Config(16, 16, 4, 1, "bf16x6"), (1024, 32)),
        ("join", Config(1, 16, 4, 1, "bf16x6"), (1, 16)),
    ],
)
def test_configs_that_are_tried_are_deepened_too(
    role: configs.Role, given: Config, blocks: tuple[int, int]
) -> None:
    assert tuning.config(chosen(64), H200, role, {role: given})[:2] == blocks


def test_what_is_chosen_twice_is_not_left_to_tf32() -> None:
    """Its blocks would have to be deeper than some GPUs have memory for."""
    for hidden, precision in ((True, "ieee"), (False, "tf32")):
        fake = FakeRuntime(H200._replace(architecture=80))
        problem = chosen(256, hidden=hidden)._replace(tf32=True)
        tensors = operands(dim=256)._replace(mask=torch.ones(1, 1, 300, 400))
        if hidden:
            tensors = tensors._replace(mask=torch.ones(1, 1, 300, 400).bool())
        CudaBackend(fake).forward(problem, "tiled", tensors)
        ((step, _),) = fake.calls
        assert step.specialisation.variant.precision == precision


def test_without_triton_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing Triton is no ImportError, and the reason has the words of the error."""
    monkeypatch.setitem(sys.modules, "triton", None)
    backend = CudaBackend()
    reason = backend.probe(backend.capabilities[0], torch.device("cuda", 0))
    assert reason is not None
    assert reason.code == "unavailable"
    assert "ModuleNotFoundError" in reason.sentence
    assert "triton" in reason.fix


def test_an_old_gpu_has_a_reason() -> None:
    backend = CudaBackend(FakeRuntime(Gpu(75, 40, 64 * 1024)))
    reason = backend.probe(backend.capabilities[0], torch.device("cuda", 0))
    assert reason is not None
    assert reason.code == "arch"
    assert "sm_75" in reason.sentence


@pytest.mark.parametrize("architecture", [80, 89, 100])
def test_hopper_kernels_are_for_hopper(architecture: int) -> None:
    """Another GPU has a reason for them alone, before anything of them is planned."""
    backend = CudaBackend(FakeRuntime(H200._replace(architecture=architecture)))
    for kernel in choice.KERNELS:
        if not kernel.capability.kernel.startswith("hopper"):
            assert kernel.refuses(H200._replace(architecture=architecture)) is None
            continue
        reason = backend.probe(kernel.capability, torch.device("cuda", 0))
        assert reason is not None
        assert reason.code == "arch"
        assert f"9.0, this is sm_{architecture}" in reason.sentence


def test_hopper_comes_after_decode_and_before_the_rest() -> None:
    half = Tensors(*(torch.randn(2, 4, 300, 64).bfloat16() for _ in range(3)))
    assert kernel_for(half) == "hopper"
    assert kernel_for(half, grad=True, stage="backward", grad_out=half.query) == "hopper"
    assert kernel_for(half._replace(query=half.query[:, :, :9])) == "decode"
    assert kernel_for(half._replace(mask=torch.ones(1, 1, 300, 300).bool())) == "hopper"
    assert kernel_for(half._replace(mask=torch.zeros(1, 1, 300, 300))) == "tiled"
    assert kernel_for(half._replace(key=strided(half.key))) == "packed"
    assert kernel_for(half, Options(-0.25)) == "tiled"


def test_importing_the_backend_imports_no_triton() -> None:
    program = (
        "import sys\n"
        "from orchard.backends.cuda import CudaBackend\n"
        "CudaBackend()\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


# What is launched


def parameters(kernel: str) -> list[str]:
    """Names of a kernel's parameters, read from its source."""
    module, _, function = kernel.partition(".")
    tree = ast.parse((SOURCES / f"{module}.py").read_text())
    found = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    return [argument.arg for argument in found.args.args]


def every_call() -> FakeRuntime:
    """Each kernel, with everything that it can be given."""
    fake = FakeRuntime()
    backend = CudaBackend(fake)
    for rows, kernel in ((300, "tiled"), (2, "decode")):
        for axes in ((2, 4, rows, 400), (2, 1, rows, 400), (1, 1, 1, 400), (1, 1, rows, 1)):
            tensors = operands(rows)._replace(mask=torch.zeros(axes))
            run(backend, tensors, EVERYTHING, kernel, mask_grad=True, grad_lse=True)
        run(backend, operands(rows, keys=30), PLAIN, kernel)
    return fake


def test_arguments_stand_where_kernels_look() -> None:
    """Tensors, strides, numbers, further integers and the variant, in the order of the names."""
    fake = every_call()
    assert len(set(fake.names())) == 7
    for step, tensors in fake.calls:
        names = parameters(step.specialisation.kernel)
        arguments = (*tensors, *step.arguments)
        assert len(names) == len(arguments)
        given = dict(zip(names, arguments, strict=True))
        assert given["how"] is step.specialisation.variant
        assert isinstance(given["numbers"], Numbers)
        for name, argument in given.items():
            assert name.endswith("_strides") == isinstance(argument, Strides)
            owner = given.get(name.removesuffix("_strides"))
            if isinstance(argument, Strides) and isinstance(owner, Tensor):
                sizes = (*owner.shape, 1)[:4]
                own = (*owner.stride(), 0)[:4]
                expected = [
                    0 if n == 1 and name == "mask_strides" else s
                    for n, s in zip(sizes, own, strict=True)
                ]
                assert list(argument) == expected, name
        assert step.programs > 0


def test_numbers() -> None:
    """Scores are in units of log 2, unless a mask is added; a softcap takes the scale to itself."""
    log2_e = 1.4426950408889634
    fake = FakeRuntime()
    backend = CudaBackend(fake)
    added = torch.zeros(1, 4, 1, 400)
    expected = {
        (Options(0.25), None): (0.25 * log2_e, 0.0),
        (Options(0.25), "additive"): (0.25, 0.0),
        (Options(0.25, 3.0), None): (0.25 / 3.0, 3.0 * log2_e),
        (Options(0.25, 3.0), "additive"): (0.25 / 3.0, 3.0),
    }
    for (options, masked), (factor, cap) in expected.items():
        tensors = operands()._replace(mask=added if masked else None)
        backend.forward(describe(tensors, options), "tiled", tensors)
        numbers = fake.calls[-1][0].arguments[-2]
        assert isinstance(numbers, Numbers)
        assert (numbers.factor, numbers.cap) == pytest.approx((factor, cap))
        assert numbers.scale == 0.25
        assert numbers[:5] == (2, 4, 2, 300, 400)


@pytest.mark.parametrize(
    ("band", "flags", "bounds"),
    [
        (None, (False, False), (0, 0)),
        (Band(None, 0), (False, True), (0, 0)),
        (Band(-3, 2**40), (True, True), (-3, 400)),
        (Band(-(2**40), None), (True, False), (-300, 0)),
    ],
)
def test_bands(band: Band | None, flags: tuple[bool, bool], bounds: tuple[int, int]) -> None:
    """A bound that is not there is not compiled; one that is fits 32 bits."""
    fake = FakeRuntime()
    tensors = operands()
    CudaBackend(fake).forward(describe(tensors, Options(1.0, band=band)), "tiled", tensors)
    ((step, _),) = fake.calls
    variant, numbers = step.specialisation.variant, step.arguments[-2]
    assert (variant.low, variant.high) == flags
    assert (numbers.low, numbers.high) == bounds


@pytest.mark.parametrize(
    ("scale", "softcap", "mask", "late"),
    [
        (0.5, 0.0, None, True),
        (0.5, 0.0, torch.bool, True),
        (-0.5, 0.0, None, False),
        (0.0, 0.0, None, False),
        (0.5, 2.0, None, False),
        (0.5, 0.0, torch.float32, False),
    ],
)
def test_late_scale(scale: float, softcap: float, mask: torch.dtype | None, late: bool) -> None:
    """The highest product is the highest score only where the scale is positive."""
    fake = FakeRuntime()
    tensors = operands()._replace(mask=mask and torch.zeros(1, 1, 1, 400, dtype=mask))
    CudaBackend(fake).forward(describe(tensors, Options(scale, softcap)), "tiled", tensors)
    assert fake.calls[0][0].specialisation.variant.late_scale == late


@pytest.mark.parametrize(
    ("options", "mask", "empty"),
    [
        (Options(1.0), False, False),
        (Options(1.0), True, True),
        (Options(1.0, band=Band(None, 0)), False, False),
        (Options(1.0, band=Band(None, -1)), False, True),
        (Options(1.0, band=Band(100, None)), False, False),
        (Options(1.0, band=Band(101, None)), False, True),
    ],
)
def test_rows_that_may_be_empty(options: Options, mask: bool, empty: bool) -> None:
    """Gradients are guarded where a row may see nothing, and only there."""
    fake = FakeRuntime()
    tensors = operands()._replace(mask=torch.ones(1, 1, 300, 400).bool() if mask else None)
    run(CudaBackend(fake), tensors, options)
    walks = [s for s, _ in fake.calls if "grad" in s.specialisation.kernel]
    assert {step.specialisation.variant.empty_rows for step in walks} == {empty}


@pytest.mark.parametrize(
    ("shape", "writer", "written"),
    [
        ((2, 4, 300, 400), "attention_grad_query", "tile"),
        ((1, 4, 300, 400), "attention_grad_mask", "tile"),
        ((2, 1, 300, 400), "attention_grad_mask", "tile"),
        ((2, 4, 1, 400), "attention_grad_key_value", "rows"),
        ((1, 1, 1, 400), "attention_grad_key_value", "rows"),
        ((2, 4, 300, 1), "attention_grad_query", "keys"),
        ((1, 1, 1, 1), "attention_grad_query", "keys"),
    ],
)
def test_mask_gradients(shape: tuple[int, ...], writer: str, written: str) -> None:
    """One kernel writes it, and nothing as large as the scores is allocated to sum it."""
    fake = FakeRuntime()
    tensors = operands()._replace(mask=torch.zeros(shape).half())
    _, grads = run(CudaBackend(fake), tensors, mask_grad=True)
    assert grads.mask is not None
    assert (grads.mask.shape, grads.mask.dtype) == (shape, torch.float16)
    modes = {
        name: step.specialisation.variant.mask_grad
        for name, (step, _) in zip(fake.names(), fake.calls, strict=True)
    }
    assert {name: mode for name, mode in modes.items() if mode != "none"} == {writer: written}
    given = next(t for name, (_, t) in zip(fake.names(), fake.calls, strict=True) if name == writer)
    target = given[-1]
    assert target is not None
    if written == "tile":
        assert (target.shape, target.dtype) == (shape, torch.float16)
    else:
        assert target.shape == ((2, 4, 1, 400) if written == "rows" else (2, 4, 300, 1))
        assert target.dtype == torch.float32


def test_nothing_is_launched_for_nothing() -> None:
    """Without rows or keys there is no launch, and the results are there all the same."""
    fake = FakeRuntime()
    for rows, keys in ((0, 9), (9, 0)):
        saved, grads = run(CudaBackend(fake), operands(rows, keys), Options(1.0, threshold=9))
        assert saved.out.shape == (2, 4, rows, 12)
        assert not saved.out.any()
        assert torch.isneginf(saved.lse).all()
        assert not any(grad.any() for grad in grads[:3])
    assert fake.calls == []


def test_decode_splits() -> None:
    """Keys are split until the GPU is busy, in whole blocks; one part needs no joining."""
    fake = FakeRuntime()
    backend = CudaBackend(fake)
    run(backend, operands(rows=1, keys=100_000), kernel="decode")
    assert fake.names()[:2] == ["attention_splits", "attention_join"]
    step, tensors = fake.calls[0]
    splits, per_split = step.arguments[-3:-1]
    block = step.specialisation.variant.block_keys
    assert (splits - 1) * per_split * block < 100_000 <= splits * per_split * block
    assert step.programs == splits * 2 * 2
    sums = tensors[-3]
    assert sums is not None
    assert sums.shape == (2, 4, 1, splits, 12)
    fake.calls.clear()
    run(backend, operands(rows=1, keys=60), kernel="decode")
    assert "attention_join" not in fake.names()


@pytest.mark.parametrize(("architecture", "early"), [(80, False), (90, True)])
def test_a_join_begins_early(architecture: int, early: bool) -> None:
    """Where a GPU has dependent launches."""
    fake = FakeRuntime(H200._replace(architecture=architecture))
    backend = CudaBackend(fake)
    for keys, expected in ((9000, [False, early]), (60, [False])):
        tensors = operands(1, keys)
        backend.forward(describe(tensors, PLAIN), "decode", tensors)
        assert [step.specialisation.variant.early for step, _ in fake.calls] == expected
        fake.calls.clear()


def decoded(
    batch: int, kv_heads: int, keys: int, rows: int = 1, options: Options = PLAIN
) -> Problem:
    """bf16, four query heads to a key head, D 128."""
    shapes = ((batch, 4 * kv_heads, rows, 128), *((batch, kv_heads, keys, 128),) * 2)
    operands = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    return describe(Tensors(*operands), options)


NARROW, WIDE = Config(16, 64, 4, 3), Config(16, 128, 4, 3)
TABLE = decoded(8, 8, 16384)


def test_the_programs_that_fit_on_a_multiprocessor() -> None:
    """Two, or one where two have not room for the keys and values they have on the way."""
    small = H200._replace(shared_memory=100 * 1024)
    halves, singles = TABLE, TABLE._replace(dtype=torch.float32)
    slim = TABLE._replace(value_shape=(8, 8, 16384, 16))
    assert [tuning._resident(halves, H200, config) for config in (NARROW, WIDE)] == [2, 1]
    assert [tuning._resident(halves, small, config) for config in (NARROW, WIDE)] == [1, 1]
    assert tuning._resident(singles, H200, NARROW) == 1
    assert tuning._resident(slim, H200, WIDE) == 2
    assert tuning._resident(halves, H200, WIDE._replace(stages=2)) == 2
    assert tuning._resident(halves, H200, WIDE._replace(stages=1)) == 2


def test_two_programs_of_any_other_shipped_decode_fit() -> None:
    """On the smallest GPU of each family that has a config of its own, and on any for the rest."""
    memory = {"default": 64 * 1024, "sm_90": 228 * 1024}
    for family, roles in configs.shipped().items():
        for size, heads in roles["decode"].items():
            dtype = torch.bfloat16 if size == "half" else torch.float32
            for dim, entry in heads.items():
                shape = (8, 8, 16384, int(dim))
                problem = TABLE._replace(
                    query_shape=shape, key_shape=shape, value_shape=shape, dtype=dtype
                )
                gpu = H200._replace(shared_memory=memory[family])
                found = Config(*entry)
                assert tuning._resident(problem, gpu, found) == (1 if found == WIDE else 2)


@pytest.mark.parametrize(("config", "resident"), [(NARROW, 2), (WIDE, 1)], ids=str)
@pytest.mark.parametrize(
    ("batch", "kv_heads", "keys"), [(8, 8, 16384), (1, 1, 16384), (1, 2, 99_000), (64, 8, 4096)]
)
def test_splits_keep_the_gpu_busy(
    batch: int, kv_heads: int, keys: int, config: Config, resident: int
) -> None:
    """No more parts than help: programs fill the GPU as well as they can, within a tenth."""
    chosen = tuning.splits(decoded(batch, kv_heads, keys), H200, config)
    places = resident * H200.processors

    def busy(splits: int) -> float:
        programs = batch * kv_heads * splits
        return programs / (-(-programs // places) * places)

    most = min(128, -(-keys // config.keys) // 4)
    best = max(map(busy, range(1, most + 1)))
    assert busy(chosen) >= 0.9 * best
    assert all(busy(fewer) < 0.9 * best for fewer in range(1, chosen))


def planned(problem: Problem) -> tuple[Step, int]:
    """The first kernel of a decode on an H200, and the keys of each of its programs."""
    step = plan_decode(problem, Setting(H200)).step
    return step, step.arguments[-2] * step.specialisation.variant.block_keys


def test_a_long_decode_on_hopper() -> None:
    """One program to a multiprocessor, with wide blocks, which are all whole."""
    step, keys = planned(TABLE)
    assert tuning.config(TABLE, H200, "decode") == WIDE
    assert (step.programs, keys) == (8 * 8 * 2, 16384 // 2)
    assert step.specialisation.variant.whole


@pytest.mark.parametrize("keys", [1000, 4096, 8192, 20_000, 40_000, 100_000])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (1, 2), (1, 8), (2, 8), (8, 8), (5, 7)])
def test_wide_blocks_keep_multiprocessors_as_busy(batch: int, kv_heads: int, keys: int) -> None:
    """The last program ends after as many keys as with the usual blocks, but for one block; of
    that time multiprocessors are busy for four fifths. Where they would not be, nothing changes."""

    def turns(step: Step) -> int:
        return -(-step.programs // H200.processors)

    problem = decoded(batch, kv_heads, keys)
    usual = plan_decode(problem, Setting(H200, {"decode": NARROW})).step
    step, per_program = planned(problem)
    if step.specialisation.variant.block_keys == WIDE.keys:
        before = turns(usual) * usual.arguments[-2] * NARROW.keys
        assert turns(step) * per_program <= before + WIDE.keys
        busy = batch * kv_heads * keys / (turns(step) * per_program * H200.processors)
        assert busy >= 0.8
    else:
        assert batch * kv_heads * keys < 1024 * H200.processors
        assert step.arguments == usual.arguments


MASKED = MaskSpec(torch.bool, (8, 32, 1, 16384), (0, 0, 0, 1))


@pytest.mark.parametrize(
    "problem",
    [
        decoded(8, 8, 2048),
        decoded(8, 8, 16384, rows=5),
        decoded(8, 8, 16384, options=Options(0.25, band=Band(-9000, None))),
        decoded(8, 8, 16384, options=Options(0.25, threshold=6000)),
        TABLE._replace(mask=MASKED),
        TABLE._replace(aligned=False),
        TABLE._replace(key_strides=(8 * 16384 * 132, 16384 * 132, 132, 1)),
        TABLE._replace(value_strides=(16384 * 2048, 256, 2048, 2)),
    ],
    ids=["short", "rows", "band", "dropout", "mask", "start", "stride", "columns"],
)
def test_what_wide_blocks_are_not_for(problem: Problem, user_table: Path) -> None:
    """Ours; what the user has tuned is taken as it is."""
    rows = 32 if problem.query_length == 5 else 16
    assert tuning.config(problem, H200, "decode") == NARROW._replace(rows=rows)
    configs.write(user_table, "sm_90", {tuning.entry_of(problem, "decode"): WIDE})
    assert tuning.config(problem, H200, "decode") == WIDE._replace(rows=rows)


@pytest.mark.parametrize(
    ("keys", "options", "whole"),
    [
        (16384, PLAIN, True),
        (16384, Options(0.25, 3.0, None, 6000), True),
        (16383, PLAIN, False),
        (16384 + 64, PLAIN, False),
        (1024 + 64, PLAIN, True),
        (16384, Options(0.25, band=Band(-9000, None)), False),
    ],
)
def test_whole_blocks(keys: int, options: Options, whole: bool) -> None:
    """Of the config that is used; the kernel that joins does not depend on it."""
    plan = plan_decode(decoded(8, 8, keys, options=options), Setting(H200))
    assert plan.step.specialisation.variant.whole == whole
    assert plan.join is not None
    assert not plan.join.specialisation.variant.whole


def test_packing_copies_what_is_strided() -> None:
    """The others are passed as they are."""
    fake = FakeRuntime()
    tensors = operands()
    tensors = tensors._replace(key=strided(tensors.key))
    run(CudaBackend(fake), tensors, kernel="packed")
    for _, (query, key, *_) in fake.calls:
        assert query is tensors.query
        assert key is not None
        assert torch.equal(key, tensors.key)
        assert key.stride() == (2 * 400 * 24, 400 * 24, 24, 1)


@pytest.fixture
def matmul() -> Iterator[Any]:
    """torch's settings for products on a GPU, which are put back."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


def test_tf32_where_torch_allows_it(matmul: Any) -> None:
    """fp32 products are exact to fp32 unless torch is told that they need not be."""
    fake = FakeRuntime(H200._replace(architecture=80))
    backend, tensors = CudaBackend(fake), operands()
    for allowed in ("ieee", "tf32", "ieee"):
        matmul.fp32_precision = allowed
        single = SimpleNamespace(dtype=torch.float32, is_cuda=True)
        problem = describe(tensors, PLAIN)._replace(tf32=allows_tf32(single))
        backend.forward(problem, "tiled", tensors)
        ((step, _),) = fake.calls
        fake.calls.clear()
        assert step.specialisation.variant.precision == allowed
        assert kernel_of(problem) == ("tiled" if allowed == "tf32" else "hopper_fp32")
    matmul.fp32_precision = "tf32"
    assert not describe(tensors, PLAIN).tf32
    assert not allows_tf32(SimpleNamespace(dtype=torch.float16, is_cuda=True))


# What is compiled


def test_layouts() -> None:
    """The axis of stride 1, and what divides the other strides."""
    assert Layout.of(Strides(4096, 2048, 64, 1)) == Layout("column", 16)
    assert Layout.of(Strides(4096, 2048, 1, 40)) == Layout("row", 8)
    assert Layout.of(Strides(0, 0, 7, 2)) == Layout("", 1)
    assert Layout.of(Strides(0, 0, 0, 0)) == Layout("", 16)
    assert Layout.of(Strides(4096, 1, 1, 1)) == Layout("column", 1)


def test_sizes_share_a_kernel() -> None:
    """Lengths and heads are arguments; dtype, head dimension and options are not."""
    fake = FakeRuntime()
    backend = CudaBackend(fake)
    kinds = [operands(), operands(rows=301), operands(keys=77)]
    kinds.append(Tensors(*(t[:1].contiguous() for t in operands()[:3])))
    for tensors in kinds:
        backend.forward(describe(tensors, PLAIN), "tiled", tensors)
    assert len({step.specialisation for step, _ in fake.calls}) == 1
    for other in (operands(dim=40), operands(value_dim=16)):
        backend.forward(describe(other, PLAIN), "tiled", other)
    assert len({step.specialisation for step, _ in fake.calls}) == 3


def test_plans_are_made_once() -> None:
    """The steps of a problem are built for its first call only."""
    fake = FakeRuntime()
    backend = CudaBackend(fake)
    for _ in range(3):
        run(backend, operands())
    steps = [step for step, _ in fake.calls]
    assert len(steps) == 12
    assert len({id(step) for step in steps}) == 4


def test_every_problem_has_a_config() -> None:
    """The table has blocks for each kernel, size and head dimension, all powers of two."""
    for role, sizes in configs.shipped()["default"].items():
        assert set(sizes) == {"half", "single"}, role
        for heads in sizes.values():
            assert list(heads) == ["16", "32", "64", "128", "256"]
    for family in configs.shipped().values():
        assert set(family) <= set(configs.shipped()["default"])
        for sizes in family.values():
            for entry in (entry for heads in sizes.values() for entry in heads.values()):
                config = configs.Config(*entry)
                for size in (config.rows, config.keys, config.warps):
                    assert size & (size - 1) == 0
                assert config.keys >= 16
                assert config.precision in ("ieee", "bf16x6")
                if config.precision == "bf16x6":  # below the blocks of wgmma
                    assert max(config.rows, config.keys) < 64


def test_tuned_families_differ() -> None:
    """A family's own entry is taken where there is one, the default's otherwise."""
    problem = describe(operands(dim=64, value_dim=64), PLAIN)
    tuned, usual = H200, Gpu(89, 100, 100 * 1024)
    assert tuning.config(problem, tuned, "grad_query") != tuning.config(
        problem, usual, "grad_query"
    )
    assert tuning.config(problem, tuned, "rows") == tuning.config(problem, usual, "rows")


# The cache of compiled kernels, with a compiler that is not there


class FakeKernel:
    """Stands for what Triton compiles."""

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*args: Any, stream: int) -> None:
            self._launches.append((grid, args, stream))

        return launch


class Compiler:
    """In the place of `compiled`: counts, may fail, and waits for the others to have asked too."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, *key: Any) -> FakeKernel:
        self.asked.append(key)
        if self.error:
            raise ValueError(self.error)
        return FakeKernel(self.launches)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    active = types.SimpleNamespace(get_current_stream=lambda index: 7 + index)
    driver = types.SimpleNamespace(active=active)
    fake = types.SimpleNamespace(runtime=types.SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setattr(runtime, "compiled", made)
    monkeypatch.setattr(TritonRuntime, "gpu", lambda *_: H200)
    return made


def a_step(device: str = "cuda:3") -> Step:
    fake = FakeRuntime()
    tensors = operands()
    problem = describe(tensors, PLAIN)
    CudaBackend(fake).forward(problem, "tiled", tensors)
    step = fake.calls[0][0]
    step.device = torch.device(device)
    return step


def test_launches(compiler: Compiler) -> None:
    """Addresses, then what every call repeats, on the current stream of the device."""
    step, triton_runtime = a_step(), TritonRuntime()
    tensor = torch.zeros(64)
    triton_runtime.launch(step, tensor, None)
    triton_runtime.launch(step, tensor, None)
    assert len(compiler.asked) == 1
    grid, args, stream = compiler.launches[1]
    assert grid == (step.programs, 1, 1)
    assert args == (tensor.data_ptr(), 0, *step.arguments)
    assert stream == 10


def test_unaligned_pointers_have_a_kernel_of_their_own(compiler: Compiler) -> None:
    """One address off a 16-byte boundary, and nothing is taken for granted."""
    step, triton_runtime = a_step(), TritonRuntime()
    tensor = torch.zeros(64)
    for operand in (tensor, tensor[1:], tensor, tensor[4:]):
        triton_runtime.launch(step, operand)
    assert [pointers.aligned for _, pointers, _ in compiler.asked] == [True, False]


def test_equal_steps_share_a_kernel(compiler: Compiler) -> None:
    triton_runtime = TritonRuntime()
    for _ in range(2):
        triton_runtime.launch(a_step(), torch.zeros(4))
    triton_runtime.launch(a_step("cuda:1"), torch.zeros(4))
    assert len(compiler.asked) == 2, "once for each device"


def test_threads_compile_once(compiler: Compiler) -> None:
    """Eight threads that meet at a new kernel wait for one of them to compile it."""
    triton_runtime, meet = TritonRuntime(), threading.Barrier(8)

    def work(_: int) -> None:
        step = a_step()
        meet.wait()
        triton_runtime.launch(step, torch.zeros(4))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(compiler.asked) == 1
    assert len(compiler.launches) == 8


def test_what_does_not_compile_is_not_compiled_again(compiler: Compiler) -> None:
    """The error has the compiler's words, and costs its time once."""
    compiler.error = "operand #3 is out of its depth"
    triton_runtime = TritonRuntime()
    for _ in range(2):
        with pytest.raises(KernelError, match=r"attention_forward.*operand #3 is out of its depth"):
            triton_runtime.launch(a_step(), torch.zeros(4))
    assert len(compiler.asked) == 1


@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize("mask_grad", [False, True])
def test_without_rows_or_keys_nothing_is_launched(name: str, mask_grad: bool) -> None:
    """Outputs are zero, lse is that of nothing, and each gradient that is asked for is zero."""
    tensors = operands(rows=0 if name == "query" else 300, keys=0 if name == "key" else 400)
    mask = torch.zeros(1, 1, tensors.query.shape[2], 1)
    fake = FakeRuntime()
    saved, grads = run(CudaBackend(fake), tensors._replace(mask=mask), mask_grad=mask_grad)
    assert fake.calls == []
    assert torch.equal(saved.out, torch.zeros(*tensors.query.shape[:3], 12))
    assert torch.equal(saved.lse, torch.full(tensors.query.shape[:3], -torch.inf))
    for grad, operand in zip(grads[:3], tensors[:3], strict=True):
        assert torch.equal(grad, torch.zeros_like(operand))
    assert grads.mask is None if not mask_grad else torch.equal(grads.mask, torch.zeros_like(mask))
