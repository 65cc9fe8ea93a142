"""`orchard tune` and the tables it writes, on a launcher that computes without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.attention.problem import Options, Tensors, describe
from orchard.backends.cuda import configs, tuning
from orchard.backends.cuda.configs import Config, Entry
from orchard.backends.cuda.configs import user_table as place
from orchard.backends.cuda.runtime import Gpu, KernelError, Step
from orchard.cli import main
from orchard.cli import tune as command
from orchard.errors import SettingError
from orchard.testing import cuda_tuning
from orchard.testing.benchmark import Case
from orchard.testing.cuda_tuning import Workbench, candidates, roles_of, tune

pytestmark = pytest.mark.dispatch

CPU = torch.device("cpu")
GPU = Gpu(90, 132, 228 * 1024)
HALF = torch.bfloat16
TILED = Case("", 1, 2, 2, rows=256, keys=256, dtype=HALF)
DECODED = Case("", 1, 8, 2, rows=1, keys=20_000, dtype=HALF)
BEST = Config(128, 32, 8, 3)  # of the candidates, whatever a GPU would say


def block(step: Step) -> Config:
    special = step.specialisation
    variant = special.variant
    return Config(
        variant.block_rows, variant.block_keys, special.warps, special.stages, variant.precision
    )


class Launcher:
    """Computes a forward in place of its kernel; one config is wrong and one does not compile."""

    wrong = Config(64, 32, 4, 3)
    broken = Config(64, 128, 8, 3)

    def __init__(self) -> None:
        self.launched: list[Step] = []

    def gpu(self, device: torch.device) -> Gpu:
        return GPU

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext()

    def launch(self, step: Step, *tensors: Tensor | None) -> None:
        self.launched.append(step)
        if block(step) == self.broken:
            raise KernelError("takes more shared memory than there is")
        if step.specialisation.kernel != "general_forward.attention_forward":
            return
        query, key, value, _, _, out, lse = tensors
        assert query is not None
        assert key is not None
        assert value is not None
        assert out is not None
        assert lse is not None
        scores = (query.float() @ key.float().mT) * query.shape[3] ** -0.5
        lse.copy_(scores.logsumexp(-1))
        out.copy_(scores.softmax(-1) @ value.float())
        if block(step) == self.wrong:
            out[..., -1, :] += 1.0


def timing(launcher: Launcher, times: Callable[[Config], float]) -> Any:
    """A clock that goes by the config of the last launch."""

    def sampling(step: Callable[[], object], device: torch.device, known: float) -> Any:
        def sample() -> float:
            step()
            return times(block(launcher.launched[-1]))

        return sample

    return sampling


def of_the_best(config: Config) -> float:
    return {BEST: 1.0, Launcher.wrong: 0.1}.get(config, 2.0)


# What is tried


def test_the_config_that_is_there_is_tried_first() -> None:
    for role, size in (("forward", "half"), ("grad_key_value", "half"), ("join", "half")):
        before = Config(64, 64, 4, 3)
        found = candidates(Entry(role, size, "64"), before)
        assert found[0] == before
        assert len(set(found)) == len(found) > 8


def test_blocks_of_an_fp32_backward_stay_below_those_of_wgmma() -> None:
    for role in ("decode", "rows", "grad_key_value", "grad_query"):
        for config in candidates(Entry(role, "single", "64"), Config(32, 32, 4, 2, "bf16x6")):
            assert config.rows < 64
            assert config.keys < 64
    forward = candidates(Entry("forward", "single", "64"), Config(32, 32, 4, 2, "bf16x6"))
    split = [config for config in forward if config.precision == "bf16x6"]
    assert {(config.rows, config.keys) for config in split} == {(32, 32)}
    assert any(config.rows == 128 for config in forward)
    halves = candidates(Entry("forward", "half", "64"), Config(64, 64, 4, 3))
    assert {config.precision for config in halves} == {"ieee"}


def test_the_rows_of_a_decode_are_the_problem_s() -> None:
    found = candidates(Entry("decode", "half", "128"), Config(16, 64, 4, 3))
    assert {config.rows for config in found} == {16}


def test_the_kernels_that_serve_a_case() -> None:
    assert roles_of(TILED) == ("forward",)
    assert roles_of(replace(TILED, backward=True)) == (
        *("forward", "rows", "grad_key_value", "grad_query"),
    )
    assert roles_of(DECODED) == ("decode", "join")
    assert roles_of(replace(DECODED, rows=17, backward=True))[0] == "forward"


# Trying


def test_the_fastest_that_is_right_is_found() -> None:
    """What is wrong or does not compile is never chosen, however fast."""
    launcher = Launcher()
    bench = Workbench(launcher, TILED, CPU)
    (found,) = tune(bench, bench.roles, 0.001, sampling=timing(launcher, of_the_best))
    assert found.entry == Entry("forward", "half", "64")
    assert (found.before, found.best) == (tuning.config(bench._problem, GPU, "forward"), BEST)
    assert found.better
    assert found.ratio is not None
    assert found.ratio.p50 == 2.0
    notes = {trial.config: trial.note for trial in found.trials if trial.seconds is None}
    assert set(notes) == {Launcher.wrong, Launcher.broken}
    assert notes[Launcher.wrong].startswith("wrong: out: error")
    assert "shared memory" in notes[Launcher.broken]
    tried = {block(step) for step in launcher.launched}
    assert tried == set(candidates(found.entry, found.before))


def test_what_is_not_faster_in_most_rounds_is_not_better() -> None:
    launcher = Launcher()
    bench = Workbench(launcher, TILED, CPU)
    before = bench.config("forward", {})
    samples: dict[Config, int] = {}

    def times(config: Config) -> float:
        """Faster while it is tried, and half of the time afterwards."""
        samples[config] = n = samples.get(config, 0) + 1
        return 0.5 if config == BEST and (n <= 3 or n % 2) else 1.0

    (found,) = tune(bench, ["forward"], 0.001, sampling=timing(launcher, times))
    assert (found.best, found.before) == (BEST, before)
    assert not found.better


def test_where_nothing_is_faster_the_old_one_stays() -> None:
    launcher = Launcher()
    bench = Workbench(launcher, TILED, CPU)
    (found,) = tune(bench, ["forward"], 0.001, sampling=timing(launcher, lambda config: 1.0))
    assert (found.best, found.ratio, found.better) == (found.before, None, False)


def test_a_backward_is_tuned_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beside what was chosen for those before it."""
    launcher = Launcher()
    monkeypatch.setattr(Workbench, "complaints", lambda *_: [])
    bench = Workbench(launcher, replace(TILED, backward=True), CPU)
    seen: list[dict[str, Config]] = []

    def times(_: Config) -> float:
        by_kernel = {
            step.specialisation.kernel.partition(".attention_")[2]: block(step)
            for step in launcher.launched[-3:]
        }
        seen.append(by_kernel)
        chosen = [by_kernel.get(role) == BEST for role in ("grad_key_value", "grad_query")]
        return 4.0 - sum(chosen)

    roles = ("grad_key_value", "grad_query")
    found = tune(bench, roles, 0.001, sampling=timing(launcher, times))
    assert [(each.entry.role, each.best, each.better) for each in found] == [
        ("grad_key_value", BEST, True),
        ("grad_query", BEST, True),
    ]
    assert seen[-1].keys() == {"rows", *roles}
    assert all(each["grad_key_value"] == BEST for each in seen[-10:])


def test_a_decode_is_launched_in_parts_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher()
    monkeypatch.setattr(Workbench, "complaints", lambda *_: [])
    bench = Workbench(launcher, DECODED, CPU)
    best = Config(1, 64, 2, 1)
    # A join's variant has the rows of its decode.
    times = timing(launcher, lambda config: 1.0 if config[1:] == best[1:] else 2.0)
    decode, join = tune(bench, bench.roles, 0.001, sampling=times)
    assert (decode.entry.role, decode.better) == ("decode", False)
    assert (join.entry, join.best, join.better) == (Entry("join", "half", "64"), best, True)


# The tables


def problem(dim: int = 64) -> Any:
    operand = torch.empty(1, 2, 300, dim, dtype=HALF)
    return describe(Tensors(operand, operand, operand), Options(0.1))


def test_the_user_s_table_goes_first(user_table: Path) -> None:
    entry = tuning.entry_of(problem(), "forward")
    shipped = tuning.config(problem(), GPU, "forward")
    configs.write(user_table, "sm_90", {entry: BEST})
    assert tuning.config(problem(), GPU, "forward") == BEST
    assert tuning.config(problem(), Gpu(80, 108, 164 * 1024), "forward") != BEST
    assert tuning.config(problem(128), GPU, "forward") == shipped
    trial = Config(64, 128, 4, 2)
    assert tuning.config(problem(), GPU, "forward", {"forward": trial}) == trial
    assert tuning.config(problem(), GPU, "rows", {"forward": trial}) != trial


def test_a_table_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    single = Config(32, 32, 4, 2, "bf16x6")
    configs.write(path, "sm_90", {Entry("forward", "half", "64"): BEST})
    configs.write(path, "sm_90", {Entry("forward", "single", "64"): single})
    configs.write(path, "sm_80", {Entry("decode", "half", "64"): BEST})
    table = configs.read(path)
    assert configs.lookup(table, "sm_90", Entry("forward", "half", "64")) == BEST
    assert configs.lookup(table, "sm_90", Entry("forward", "single", "64")) == single
    assert configs.lookup(table, "sm_80", Entry("decode", "half", "64")) == BEST
    assert configs.lookup(table, "sm_80", Entry("forward", "half", "64")) is None
    assert [each.name for each in tmp_path.iterdir()] == ["table.json"]


def test_a_table_is_written_as_the_shipped_one_is(tmp_path: Path) -> None:
    shipped = files("orchard.backends.cuda").joinpath("tuning.json").read_text()
    path = tmp_path / "tuning.json"
    path.write_text(shipped)
    configs.write(path, "sm_90", {})
    assert path.read_text() == shipped


def test_where_the_user_s_table_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert place() == tmp_path / "orchard" / "cuda-tuning.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert place() == tmp_path / "home" / ".config" / "orchard" / "cuda-tuning.json"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"sm_90": {"backward": {}}}', "'backward' is not one of forward, decode"),
        ('{"sm_90": {"forward": {"double": {}}}}', "'double' is not one of half, single"),
        ('{"sm_90": {"forward": {"half": {"64": [64, 64]}}}}', "TypeError"),
        ('{"sm_90": {"forward": {"half": {"64": [64, 48, 4, 2]}}}}', "keys of"),
        ('{"sm_90": {"forward": {"half": {"64": [64, 64, 4, 0]}}}}', "stages of"),
        ('{"sm_90": {"forward": {"half": {"64": [64, 64, 4, 2, "fp8"]}}}}', "'fp8'"),
    ],
)
def test_a_table_that_is_none(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(SettingError, match="is no table of configs") as raised:
        configs.read(path)
    assert complaint in str(raised.value)
    assert str(path) in str(raised.value)


# The command


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    assert "sees no NVIDIA GPU here" in capsys.readouterr().err


def test_without_triton(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_tuning, "open_runtime", missing)
    assert main(["tune"]) == 2
    assert "Triton does not work here" in capsys.readouterr().err


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """A GPU that is not there, whose clock knows the best config."""
    found = Launcher()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_tuning, "open_runtime", lambda: found)
    # The operands lie on the CPU.
    monkeypatch.setattr(
        cuda_tuning, "Workbench", lambda runtime, case, _: Workbench(runtime, case, CPU)
    )

    def quick(bench: Workbench, roles: Any, seconds: float, note: Any) -> Any:
        return tune(bench, roles, seconds, sampling=timing(found, of_the_best), note=note)

    monkeypatch.setattr(cuda_tuning, "tune", quick)
    return found


def test_what_is_better_is_kept(
    launcher: Launcher,
    user_table: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the user's table or another, and plans that are made from now on see it."""
    monkeypatch.setenv("COLUMNS", "200")
    words = ["tune", "--shape=1,2,256,64", "--seconds=0.001"]
    other = tmp_path / "other.json"
    before = tuning.config(problem(), GPU, "forward")
    assert main([*words, "--dry-run"]) == 0
    assert main([*words, f"--table={other}"]) == 0
    assert not user_table.exists()
    assert tuning.config(problem(), GPU, "forward") == before
    capsys.readouterr()
    assert main(words) == 0
    assert tuning.config(problem(), GPU, "forward") == BEST
    shown, progress = capsys.readouterr()
    assert "2.00 (2.00-2.00)" in shown
    assert "2 of no use" in shown
    assert f"Kept: {user_table}" in shown
    assert "tune B1 H2 S256 D64 bf16: " in progress
    for path in (other, user_table):
        assert json.loads(path.read_text()) == {"sm_90": {"forward": {"half": {"64": list(BEST)}}}}


def test_shapes() -> None:
    case = command._shape("8,32/8,1x16384,128")
    assert (case.batch, case.heads, case.kv_heads) == (8, 32, 8)
    assert (case.rows, case.keys, case.dim, case.value_dim) == (1, 16384, 128, 128)
    for text in command.SHAPES:
        assert command._shape(text).batch > 0


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--shape=4,16,4096", "is not B,H,S,D, such as"),
        ("--shape=0,16,4096,64", "is not B,H,S,D, such as"),
        ("--shape=4,16/3,4096,64", "3 does not divide 16 heads"),
        ("--only=backward", "'backward' is not one of forward, decode"),
        ("--dtype=float64", "invalid choice"),
    ],
)
def test_bad_arguments(option: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["tune", option])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err
