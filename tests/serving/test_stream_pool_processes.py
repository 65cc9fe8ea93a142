"""StreamPool where processes end, fork and spawn: each program runs in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest
import torch

REPEATS = 2  # of each program here; a stress run asks for more
DEADLINE = 120.0  # seconds for one process

BEGIN = """
    import atexit, os, signal, sys, threading, time
    import torch
    from orchard.serving import StreamPool

    x = torch.ones(200, 200)

    def start(*works):
        '''Daemon threads, each of which has said that it is at work.'''
        for work in works:
            begun = threading.Event()
            threading.Thread(target=work, args=(begun,), daemon=True).start()
            begun.wait()
"""

# What the interpreter meets at its end, and what is printed then.
EXITS = {
    "an open block that waits": (
        """
        pool = StreamPool("cpu")
        def work(begun):
            with pool.stream():
                begun.set()
                threading.Event().wait()
        start(work, work, work)
        """,
        "",
    ),
    "an open block that computes": (
        """
        pool = StreamPool("cpu")
        def work(begun):
            with pool.stream():
                while True:
                    x @ x
                    begun.set()
        start(work, work, work)
        """,
        "",
    ),
    "an open block in one long call": (
        """
        pool = StreamPool("cpu")
        big = torch.ones(3000, 3000)
        def work(begun):
            with pool.stream():
                begun.set()
                big @ big
        start(work, work)
        """,
        "",
    ),
    "blocks one after the other": (
        """
        pool = StreamPool("cpu", size=2)
        def work(begun):
            while True:
                with pool.stream():
                    x @ x
                begun.set()
        start(*[work] * 5)
        """,
        "",
    ),
    "a thread that waits for a lane": (
        """
        pool = StreamPool("cpu", size=1, on_exhausted="wait")
        def hold(begun):
            with pool.stream():
                begun.set()
                threading.Event().wait()
        def want(begun):
            begun.set()
            with pool.stream():
                print("never")
        start(hold, want, want)
        """,
        "",
    ),
    "futures that run and futures that wait": (
        """
        pool = StreamPool("cpu", size=2)
        running = threading.Barrier(3)
        def work(begun):
            running.wait()
            for _ in range(300):
                y = x @ x
            return float(y.sum())
        futures = [pool.submit(work, None) for _ in range(2)]
        futures += [pool.submit(int) for _ in range(50)]
        def tell(future):
            '''Runs in whatever thread ends the future, the main one at exit.'''
            states.append("cancelled" if future.cancelled() else future.result())
        states = []
        for future in futures:
            future.add_done_callback(tell)
        running.wait()
        def last():
            assert all(future.done() for future in futures)
            ran = [state for state in states if state != "cancelled"]
            assert ran.count(200.0**3) == 2 and ran.count(0) == len(ran) - 2
            print("all resolved")
        """,
        "all resolved\n",
    ),
    "handlers that use the pool": (
        """
        pool = StreamPool("cpu")
        def work(begun):
            while True:
                with pool.stream():
                    x @ x
                begun.set()
        start(work, work)
        def last():
            with pool.stream() as lane:
                print(lane.index, float((x @ x).sum()) == 200**3, pool.stats().submitted)
            pool.close()
        """,
        "0 True 0\n",
    ),
    "a handler that joins a thread": (
        """
        pool = StreamPool("cpu")
        stop = threading.Event()
        def work(begun):
            while not stop.is_set():
                with pool.stream():
                    x @ x
                begun.set()
        start(work)
        def last():
            stop.set()
            for thread in threading.enumerate():
                if thread is not threading.main_thread():
                    thread.join()
            print("joined")
        """,
        "joined\n",
    ),
    "threads that the interpreter waits for": (
        """
        pool = StreamPool("cpu", size=3)
        gate = threading.Event()
        def work():
            gate.wait()
            with pool.stream():
                inside = pool.submit(lambda: float((x @ x).sum())).result()
            os.write(1, b"right\\n" if inside == 200**3 else b"wrong\\n")
        for _ in range(4):
            threading.Thread(target=work).start()
        def open_gate():
            threading.main_thread().join()
            gate.set()
        threading.Thread(target=open_gate).start()
        """,
        "right\n" * 4,
    ),
    "a way out from inside a block": (
        """
        pool = StreamPool("cpu")
        future = pool.submit(lambda: 1)
        with pool.stream():
            future.result()
            sys.exit(0)
        """,
        "",
    ),
    "static objects of every kind": (
        """
        class Static:
            pool = StreamPool("cpu", size=2)
            lanes, events = [], []
            def __del__(self):
                self.lanes.clear()
        static = Static()
        static.itself = static
        local = threading.local()
        def work(begun):
            with static.pool.stream() as lane:
                local.kept = (lane, lane.record(), x @ x, static)
                static.lanes.append(lane)
            begun.set()
            threading.Event().wait()
        start(work, work, work)
        block = static.pool.stream()
        block.__enter__()
        static.pool.submit(lambda: x @ x)
        """,
        "",
    ),
    "many threads that have ended": (
        """
        pool = StreamPool("cpu", size=4)
        def work():
            with pool.stream():
                x @ x
        for _ in range(10):
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
        print(pool.stats().leases, pool.stats().in_use)
        """,
        "80 0\n",
    ),
}


def program(body: str) -> str:
    """With `last`, where a program has one, registered before Orchard's own handlers."""
    late = "import atexit\natexit.register(lambda: globals().get('last', int)())\n"
    return late + dedent(BEGIN) + dedent(body)


def outcomes(code: str, times: int, *arguments: str) -> list[tuple[int, str, str]]:
    """Status, output and errors of that many fresh processes, two of them at a time."""

    def run(_: int) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    with ThreadPoolExecutor(2) as pairs:
        return list(pairs.map(run, range(times)))


@pytest.mark.stress
@pytest.mark.parametrize("name", EXITS)
def test_exit_is_clean_and_silent(name: str) -> None:
    """Status 0 and not a word of ours, every time."""
    body, printed = EXITS[name]
    assert outcomes(program(body), REPEATS) == [(0, printed, "")] * REPEATS


FORK = """
    times = int(sys.argv[1])
    pool = StreamPool("cpu", size=3, on_exhausted="share")
    expected = x @ x
    wrong, stop = [], threading.Event()

    def check(where):
        '''By every way of using a pool; torch itself is used in lanes only.'''
        def work():
            with pool.stream():
                if not torch.equal(x @ x, expected):
                    wrong.append(where)
        work()
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        for future in [pool.submit(work) for _ in range(6)]:
            future.result()

    def busy():
        while not stop.is_set():
            check("beside")

    def fork_and_check():
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            check("child")
            now = pool.stats()
            if now.in_use > 1:  # the forking thread's own, where it is not the main one
                wrong.append(f"child holds {now}")
            sys.stdout.flush()
            sys.exit(len(wrong)) if threading.current_thread() is main else os._exit(len(wrong))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    main = threading.main_thread()
    statuses = []
    threads = [threading.Thread(target=busy, daemon=True) for _ in range(3)]
    for thread in threads: thread.start()
    for _ in range(times):
        fork_and_check()
        with pool.stream():
            fork_and_check()
    def elsewhere():
        with pool.stream():
            fork_and_check()
    for _ in range(2):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    stop.set()
    for thread in threads: thread.join()
    check("parent")
    print(statuses == [0] * (2 * times + 2), wrong, pool.stats().in_use)
"""


@pytest.mark.stress
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_beside_threads_at_work() -> None:
    """The child's pool works, in a block begun before too; the parent goes on."""
    code = "import warnings; warnings.simplefilter('ignore')\n" + program(FORK)
    assert outcomes(code, 1, "5") == [(0, "True [] 0\n", "")]


SPAWN = """
    import sys
    import torch
    import torch.multiprocessing as multiprocessing
    from orchard.serving import StreamPool

    def serve(seeds):
        with StreamPool("cpu", size=2) as pool:
            return [future.result() for future in [pool.submit(compute, seed) for seed in seeds]]

    def compute(seed):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
        return (x @ x).tolist()

    if __name__ == "__main__":
        pool = StreamPool("cpu")
        with pool.stream(), multiprocessing.get_context("spawn").Pool(2) as processes:
            halves = processes.map(serve, [[0, 1, 2], [3, 4, 5]])
        torch.set_num_threads(1)
        print(halves == [[compute(seed) for seed in half] for half in ([0, 1, 2], [3, 4, 5])])
"""


@pytest.mark.stress
def test_spawned_processes_compute(tmp_path: Path) -> None:
    """Each with a pool of its own, bit for bit what this process finds."""
    script = tmp_path / "spawn.py"
    script.write_text(dedent(SPAWN))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


CUDA_FORK = """
    from orchard.errors import ForkedProcessError
    pool = StreamPool("cuda")
    y = torch.ones(64, 64, device="cuda")
    with pool.stream() as lane:
        before = lane.record()
        child = os.fork()
        if child == 0:
            told = 0
            for use in (pool.stats, pool.synchronize, lane.record, lambda: pool.submit(int)):
                try:
                    use()
                except ForkedProcessError as error:
                    told += "spawn" in str(error)
            os._exit(told)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), float((y @ y).sum()) == 64**3)
    print(pool.submit(lambda: float((y @ y).sum())).result() == 64**3)
"""

CUDA_EXIT = """
    pool = StreamPool("cuda")
    y = torch.ones(512, 512, device="cuda")
    def work(begun):
        with pool.stream() as lane:
            while True:
                y @ y
                lane.record()
                begun.set()
    def short(begun):
        while True:
            with pool.stream() as lane:
                y @ y
                lane.synchronize()
            begun.set()
    start(work, work, short, short)
    future = pool.submit(lambda: y @ y)
"""


@pytest.mark.cuda
@pytest.mark.stress
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("body", "printed"),
    [(CUDA_FORK, "4 True\nTrue\n"), (CUDA_EXIT, "")],
    ids=["fork", "exit"],
)
def test_cuda_processes(body: str, printed: str) -> None:
    """A forked child is told to spawn, and a busy device does not disturb the end."""
    code = "import warnings; warnings.simplefilter('ignore')\n" + program(body)
    assert outcomes(code, REPEATS) == [(0, printed, "")] * REPEATS


def test_every_program_could_fail() -> None:
    """The runner sees a signal, an error and a word on standard error."""
    found = outcomes("import os, sys; sys.stderr.write('x'); os.kill(os.getpid(), 6)", 1)
    assert found == [(-6, "", "")] or found == [(-6, "", "x")]
    assert outcomes("print(1); raise SystemExit(3)", 1) == [(3, "1\n", "")]
