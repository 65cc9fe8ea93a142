"""The interpreter ends while threads that it does not wait for are in the middle of calls."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import orchard
from orchard.attention import leaving

PROGRAM = """
    import os, threading, time
    import torch, orchard
    from orchard.backends.reference import ReferenceBackend

    inside = threading.Event()
    quick = ReferenceBackend.{stage}

    def slow(*call):
        inside.set()
        time.sleep(0.3)
        return quick(*call)

    def work():
        x = torch.randn(1, 2, 8, 16, requires_grad=True)
        while True:
            orchard.attention(x, x, x, backend="reference").sum().backward()

    x = torch.randn(1, 2, 8, 16)
    orchard.attention(x, x, x, backend="reference")
    ReferenceBackend.{stage} = slow
    threading.Thread(target=work, daemon=True).start()
    inside.wait()
"""


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_exit_during_a_call(stage: str) -> None:
    """Status 0 and not a word, where torch alone would abort."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM.format(stage=stage))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


JOINED_AT_EXIT = """
    import atexit, threading
    import torch

    stop = threading.Event()

    def end():
        stop.set()
        worker.join()
        print("joined")

    atexit.register(end)  # before Orchard is imported, so it runs after Orchard's own
    started = threading.Event()

    def work():
        import orchard
        x = torch.randn(1, 2, 64, 16)
        while not stop.is_set():
            orchard.attention(x, x, x)
            started.set()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    started.wait()
"""


@pytest.mark.slow
def test_a_handler_that_joins_a_calling_thread() -> None:
    """A thread that somebody waits for at exit is held back for a while, not for ever."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(JOINED_AT_EXIT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "joined\n", "")


def test_nobody_is_inside_afterwards() -> None:
    """Calls count while they last, also those that raise, and a nested one twice."""
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    orchard.attention(x, x, x).sum().backward()
    assert leaving._inside == []
    with pytest.raises(orchard.NotServedError):
        orchard.attention(x.double(), x.double(), x.double(), backend="aten")
    assert leaving._inside == []
    with leaving.inside, leaving.inside:
        assert leaving._inside == [threading.get_ident()] * 2
    assert leaving._inside == []


def test_the_leaving_thread_still_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs at exit in the thread that leaves may call attention."""
    monkeypatch.setattr(leaving, "_leaver", threading.get_ident())
    x = torch.randn(1, 2, 8, 16)
    assert orchard.attention(x, x, x).shape == x.shape


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_forgets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child does not wait for its parent's threads, and keeps its own place."""
    me = threading.get_ident()
    monkeypatch.setattr(leaving, "_inside", [me, me + 1, me, me + 2])
    leaving._forget_others()
    assert leaving._inside == [me, me]
