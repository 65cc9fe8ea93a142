"""Programs for fresh processes that end, fork and spawn with pools and queues at work.

Each comes with what it prints when all is well; then it ends with 0 and says nothing else.
"""

from __future__ import annotations

import sys
from textwrap import dedent

_POOL_BEGIN = """
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
POOL_EXITS = {
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

_POOL_FORK = """
    times = 3
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

# A thread that threading does not list stands for those of OpenMP and those that end.
_STRANGER_FORK = """
    import _thread, hashlib

    def work():
        begun.release()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # in one piece, without the GIL
        done.release()
        ended.acquire()

    begun, done, ended = (threading.Semaphore(0) for _ in range(3))
    StreamPool("cpu", size=1).submit(int).result()  # a thread has been in a lane
    clock = time.pthread_getcpuclockid(_thread.start_new_thread(work, ()))
    begun.acquire()
    used = []
    os.register_at_fork(after_in_parent=lambda: used.append(time.clock_gettime(clock)))
    child = os.fork()
    if child == 0:
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.acquire()
    print(status, used[0] > 0.9 * time.clock_gettime(clock))
    ended.release()
"""
POOL_FORKS = {"fork beside threads at work": (_POOL_FORK, "True [] 0\n")}
if sys.platform == "linux":  # where a thread can see what others do
    POOL_FORKS["fork beside a thread of a library"] = (_STRANGER_FORK, "0 True\n")

SPAWN = """
    import os
    os.environ["OMP_NUM_THREADS"] = "1"  # equal bits in every process
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
SPAWN_PRINTS = "True\n"

# With an NVIDIA GPU: a forked child is told to spawn, a busy device does not disturb the end.
_CUDA_FORK = """
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

_CUDA_EXIT = """
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
CUDA_PROGRAMS = {
    "a fork beside a GPU": (_CUDA_FORK, "4 True\nTrue\n"),
    "an end beside a GPU": (_CUDA_EXIT, ""),
}

_QUEUE_BEGIN = """
import os, sys, threading, time
import torch
from orchard.errors import ForkedProcessError, QueueClosed
from orchard.serving.batch_queue import BatchQueue

began, go = threading.Event(), threading.Event()

def function(x):
    if x[0, 0] == 7:
        began.set()
        go.wait(60)
    return x * 2

def row(value):
    return torch.full((1, 2), float(value))
"""

_PENDING = """
        queue = BatchQueue(function, max_delay=1000.0, workers=2)
        future = queue.submit(row(1), deadline=1000)
        future.add_done_callback(lambda f: print(type(f.exception()).__name__))
"""
_ASKING = """
        def client():
            x = row(1)  # to drop a tensor is to be in torch, too
            try:
                while True:
                    queue.submit(x).result()
            except QueueClosed:
                pass
        for _ in range(16):
            threading.Thread(target=client, daemon=True).start()
        time.sleep(0.1)
        """
QUEUE_EXITS = {
    "a request that waits for company": (_PENDING, "QueueClosed\n"),
    "a request that waits, and one that runs": (
        _PENDING
        + """
        queue.submit(torch.full((40, 3), 7.0))
        began.wait(60)
        go.set()
        """,
        "QueueClosed\n",
    ),
    "a way out with a request that waits": (
        _PENDING
        + """
        raise SystemExit(0)
        """,
        "QueueClosed\n",
    ),
    "a batch that runs": (
        """
        queue = BatchQueue(function, max_delay=0)
        future = queue.submit(row(7))
        future.add_done_callback(lambda f: print(f.result()[0, 0].item()))
        began.wait(60)
        queue.submit(row(1)).add_done_callback(lambda f: go.set())  # with QueueClosed, at exit
        """,
        "14.0\n",
    ),
    "threads that outlive the main thread": (
        """
        queue = BatchQueue(function, max_delay=0)
        def late():
            threading.main_thread().join()
            print(queue.submit(row(3)).result(60)[0, 0].item())
        threading.Thread(target=late).start()
        """,
        "6.0\n",
    ),
    "daemon threads that ask and wait": (
        """
        queue = BatchQueue(function)
        """
        + _ASKING,
        "",
    ),
    "daemon threads that ask and wait on one core": (
        """
        cores = getattr(os, "sched_getaffinity", lambda number: [None])(0)
        queue = BatchQueue(function, core=min(cores))
        """
        + _ASKING,
        "",
    ),
}
QUEUE_FORKS = {
    "fork with requests in flight": (
        """
        queue = BatchQueue(function, max_batch=1, max_pending=2)
        held = queue.submit(row(7))
        assert began.wait(60)
        pending = queue.submit(row(1), deadline=600)
        locked, unlock = threading.Event(), threading.Event()
        def someone():  # who reads the future at the moment of the fork
            with held._condition:
                locked.set()
                unlock.wait(60)
        threading.Thread(target=someone).start()
        assert locked.wait(60)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for future in (held, pending):
                said.append(type(future.exception(60)).__name__)
            for call in (lambda: queue.submit(row(1)), queue.flush, queue.stats):
                try:
                    call()
                except ForkedProcessError as error:
                    said.append("parent" if "parent" in str(error) else str(error))
            queue.close()
            with BatchQueue(function) as own:
                said.append(str(own.submit(row(4)).result(60)[0, 0].item()))
            os.write(write, " ".join(said).encode())
            sys.exit(0)
        unlock.set()
        assert os.waitpid(child, 0)[1] == 0
        print(os.read(read, 1000).decode())
        go.set()
        print(held.result(60)[0, 0].item(), pending.result(60)[0, 0].item())
        print(queue.submit(row(5)).result(60)[0, 0].item())
        queue.close()
        """,
        "ForkedProcessError ForkedProcessError parent parent parent 8.0\n14.0 2.0\n10.0\n",
    ),
    "fork while locks are taken": (
        """
        queue = BatchQueue(function, workers=2, max_delay=0)
        stop = threading.Event()
        def client():
            while not stop.is_set():
                queue.submit(row(1)).result(60)
        threads = [threading.Thread(target=client) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            futures = [queue.submit(row(n)) for n in (1, 2)]
            child = os.fork()
            if child == 0:
                for future in futures:
                    error = future.exception(60)
                    assert error is None or isinstance(error, ForkedProcessError), error
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert [f.result(60)[0, 0].item() for f in futures] == [2, 4]
        stop.set()
        for thread in threads:
            thread.join()
        queue.close()
        print("done")
        """,
        "done\n",
    ),
}


def pool_program(body: str) -> str:
    """With `last`, where a program has one, registered before Orchard's own handlers."""
    late = "import atexit\natexit.register(lambda: globals().get('last', int)())\n"
    return _quiet(late + dedent(_POOL_BEGIN) + dedent(body))


def queue_program(body: str) -> str:
    return _quiet(_QUEUE_BEGIN + dedent(body))


def spawn_program() -> str:
    return dedent(SPAWN)


def _quiet(code: str) -> str:
    """Python 3.12 warns of every fork beside threads, which these programs are about."""
    return "import warnings\nwarnings.simplefilter('ignore', DeprecationWarning)\n" + code
