from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import orchard
from orchard.attention.compat import serve as right
from orchard.cli import comparison, corpus, main
from orchard.cli.comparison import Comparison, Mark, Pair, exactness
from orchard.cli.minigpt import MiniGPT, Shape, Text, Trainer, batches, generate
from orchard.integrations import torch_sdpa

pytestmark = pytest.mark.cli

STEPS = 3
SMALL = Shape(vocabulary=36, context=16, width=16, heads=2, batch=4)
CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that trains in no time, and a short sample."""
    monkeypatch.setattr(comparison, "Shape", lambda vocabulary: SMALL)
    monkeypatch.setattr(comparison, "SAMPLE", 12)


def routed_calls() -> int:
    return int(orchard.stats()["torch_sdpa"]["served"])


def test_demo_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real model for a few steps: exit status, text and data agree, torch is as it was."""
    file = tmp_path / "demo.json"
    assert main(["demo", "--device", "cpu", "--steps", str(STEPS), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    found: dict[str, Any] = json.loads(file.read_text())

    assert found["passed"]
    assert all(check["holds"] for check in found["checks"])
    layers = found["model"]["layers"]
    marks = found["losses"]
    assert [mark["step"] for mark in marks] == list(range(STEPS + 1))
    assert marks[0]["held_out"]["orchard"] == pytest.approx(marks[0]["held_out"]["torch"])
    assert marks[-1]["held_out"]["orchard"] < marks[0]["held_out"]["orchard"]

    calls = layers * (STEPS + len(marks))
    assert found["calls"] == {"orchard": calls, "torch": calls}
    assert found["served"] == {"orchard": calls, "torch": 0}
    assert found["stats"]["torch_sdpa"] == {"served": calls, "delegated": {}}
    assert sum(found["stats"]["calls"]["forward"].values()) == calls
    assert sum(found["stats"]["calls"]["backward"].values()) == layers * STEPS

    assert found["plan"]["forward"] in found["stats"]["calls"]["forward"]
    assert found["plan"]["backward"] in found["stats"]["calls"]["backward"]
    assert all(peak > 2**20 for peak in found["peak_memory_bytes"].values())
    assert all(each["p50"] > 0 for each in found["seconds_per_step"].values())
    assert len(found["exactness"]) == 1 + len(list(MiniGPT(Shape(36)).parameters()))

    for expected in (found["plan"]["text"], "dropout differ by design", *found["advice"]):
        assert " ".join(expected.split()) in " ".join(printed.split())
    assert printed.splitlines()[-1].startswith("Passed on cpu")

    before = routed_calls()
    F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
    assert routed_calls() == before


def test_both_runs_start_equal_and_see_the_same_batches(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same weights to the bit, same batches in the same order, ours and torch's in turn."""
    compared = Comparison(CPU, STEPS, seed=5)
    ours, theirs = (run.trainer for run in compared.runs)
    assert ours.model is not theirs.model
    one, other = (trainer.model.state_dict() for trainer in (ours, theirs))
    assert all(torch.equal(one[name], other[name]) for name in one | other)

    seen: list[tuple[Trainer, Tensor]] = []
    step = Trainer.step

    def watched(trainer: Trainer, batch: Tensor) -> float:
        seen.append((trainer, batch.clone()))
        return step(trainer, batch)

    monkeypatch.setattr(Trainer, "step", watched)
    compared.race()
    assert [trainer for trainer, _ in seen] == [ours, theirs] * STEPS
    fed = [batch for _, batch in seen]
    assert all(torch.equal(a, b) for a, b in zip(fed[::2], fed[1::2], strict=True))
    assert not torch.equal(fed[0], fed[2])


def test_same_seed_same_losses(small: None) -> None:
    """The whole run, dropout included, follows from the seed."""
    first, again, other = (Comparison(CPU, STEPS, seed).race() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_exactness_is_measured(small: None) -> None:
    """fp32 has errors beside fp64, and they are within the budget on weights of any kind."""
    compared = Comparison(CPU, STEPS, seed=0)
    deviations, served_by = exactness(compared.runs.orchard.trainer.model, compared.held_out)
    assert served_by != "nobody"
    assert all(deviation.holds for deviation in deviations)
    assert all(0 < deviation.orchard < 1e-4 for deviation in deviations)
    assert all(0 < deviation.torch < 1e-4 for deviation in deviations)


def test_wrong_attention_is_found(
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error of one part in ten thousand fails the exactness check and nothing else."""
    monkeypatch.setattr(torch_sdpa, "serve", lambda *call: 1.0001 * right(*call))
    monkeypatch.setattr(comparison, "LEARNT", 1.1)
    file = tmp_path / "demo.json"
    assert main(["demo", "--device", "cpu", "--steps", str(STEPS), "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert not found["passed"]
    assert [check["name"] for check in found["checks"] if not check["holds"]] == ["exactness"]
    assert "FAILED: exactness" in capsys.readouterr().out.splitlines()[-1]


def test_unrouted_calls_are_found(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch run that Orchard serves is no comparison, and the routing check says so."""
    compared = Comparison(CPU, STEPS, seed=0)
    with orchard.enabled():
        compared.race()
    check = comparison.check_routing(compared.runs)
    assert not check.holds
    assert "of torch's" in check.sentence


@pytest.mark.parametrize(
    ("last", "learnt", "agree"),
    [
        (Pair(0.3, 0.31), True, True),
        (Pair(3.4, 3.4), False, True),
        (Pair(0.3, 0.9), True, False),
        (Pair(0.3, 3.4), False, False),
        (Pair(float("nan"), 0.3), False, False),
    ],
)
def test_losses_are_judged(last: Pair[float], learnt: bool, agree: bool) -> None:
    """Both runs have to learn and to end near each other; a loss that is no number is neither."""
    marks = [Mark(0, None, Pair(3.5, 3.5)), Mark(9, None, last)]
    assert comparison.check_learning(marks).holds == learnt
    assert comparison.check_agreement(marks).holds == agree


def test_interrupt_restores_torch(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside a step of ours: status 130, and torch's attention is torch's again."""

    def interrupted(trainer: Trainer, batch: Tensor) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "_peak", lambda run, batch: None)
    monkeypatch.setattr(Trainer, "step", interrupted)
    assert main(["demo", "--device", "cpu"]) == 130
    F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
    assert torch_sdpa._state.depth == 0
    assert routed_calls() == SMALL.layers  # the first held-out loss


@pytest.mark.parametrize(
    "options", [["--steps", "0"], ["--steps", "many"], ["--device", "abacus"], ["--seed", "x"]]
)
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *options])
    assert stopped.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_what_cannot_run_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that torch does not see, a folder that does not exist."""
    monkeypatch.setattr("orchard.dispatch.report.visible_devices", lambda: (CPU,))
    assert main(["demo", "--device", "mps"]) == 2
    assert "sees no mps device" in capsys.readouterr().err
    assert main(["demo", "--json", str(tmp_path / "absent" / "demo.json")]) == 2
    assert "absent" in capsys.readouterr().err


def test_corpus_is_the_same_everywhere() -> None:
    """The bytes of the text, so that results of different machines can be compared."""
    text = corpus.text()
    assert text == corpus.text()
    assert 30_000 < len(text) < 100_000
    assert text.isascii()
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest.startswith("1f0bcab46cf034fa")


def test_text_round_trip_and_split() -> None:
    """No character is lost, and nothing that is held out is trained on."""
    text = corpus.text()
    coded = Text(text)
    assert coded.decode(torch.cat([coded.training, coded.held_out])) == text
    shape = Shape(len(coded.alphabet))
    for batch in batches(coded.held_out, shape, 2, seed=0):
        assert batch.shape == (shape.batch, shape.context + 1)
        for window in batch:
            assert coded.decode(window) in text[len(coded.training) :]


def test_attention_gets_permuted_views() -> None:
    """The model hands torch permuted [B, S, H, D], and no future reaches the past."""
    torch.manual_seed(0)
    model = MiniGPT(SMALL).eval()
    tokens = torch.randint(36, (2, 16))
    operands = model.first_operands(tokens)
    assert all(t.shape == (2, 2, 16, 8) and not t.is_contiguous() for t in operands)
    assert all(t.stride(2) > t.stride(1) > t.stride(3) for t in operands)
    changed = tokens.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])


def test_generation_continues_past_the_context() -> None:
    torch.manual_seed(0)
    model = MiniGPT(SMALL)
    start = torch.tensor([1, 2, 3])
    tokens = generate(model, start, 2 * SMALL.context, seed=1)
    assert tokens[:3].tolist() == [1, 2, 3]
    assert len(tokens) == 3 + 2 * SMALL.context
    assert torch.equal(tokens, generate(copy.deepcopy(model), start, 2 * SMALL.context, seed=1))
