"""What importing Orchard does, and does not do."""

from __future__ import annotations

import json
import subprocess
import sys

import orchard

PROGRAM = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import orchard
took = time.perf_counter() - start
print(json.dumps({"took": took, "new": sorted(set(sys.modules) - before)}))
"""


def fresh(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_lean() -> None:
    """Importing Orchard loads Orchard's own modules and the standard library, nothing optional."""
    new = json.loads(fresh(PROGRAM))["new"]
    roots = {name.partition(".")[0] for name in new}
    optional = {"numpy", "rich", "matplotlib", "triton", "transformers", "hypothesis", "pytest"}
    assert not roots & optional
    assert roots - {"orchard"} <= set(sys.stdlib_module_names)
    assert not any(name.startswith(("orchard.cli", "orchard.testing")) for name in new)


def test_import_starts_nothing() -> None:
    """No thread, no CUDA context, no compiler and no planner exist after the import."""
    program = (
        "import threading, sys, torch, orchard\n"
        "from orchard.dispatch import planner\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert planner._planner is None\n"
    )
    fresh(program)


def test_operators_are_registered_by_the_import() -> None:
    """The operators exist, with their schemas, as soon as Orchard is imported."""
    fresh(
        "import torch, orchard\n"
        "assert 'query' in str(torch.ops.orchard.attention_forward.default._schema)\n"
        "assert 'grad_out' in str(torch.ops.orchard.attention_backward.default._schema)\n"
    )


def test_public_names() -> None:
    """`__all__` is sorted, complete and importable."""
    assert orchard.__all__ == sorted(orchard.__all__)
    for name in orchard.__all__:
        assert getattr(orchard, name) is not None


def test_commands_without_torch() -> None:
    """Every command but doctor says that torch is missing, in words."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from orchard.cli import main\n"
        "sys.exit(10 + main(['verify']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 12
    assert done.stderr.startswith("orchard verify needs a working torch")
    assert done.stdout == ""


def test_typed() -> None:
    """The package tells type checkers that it is annotated."""
    from importlib.resources import files

    assert files("orchard").joinpath("py.typed").is_file()


def test_backends_stays_a_function() -> None:
    """The package of the same name does not take the place of `orchard.backends`."""
    fresh(
        "import torch, orchard\n"
        "q = torch.randn(1, 1, 2, 4)\n"
        "orchard.attention(q, q, q)\n"
        "import orchard.backends.aten\n"
        "assert orchard.backends() == orchard.backends()\n"
        "assert {'cpu', 'aten', 'reference'} <= {entry.backend for entry in orchard.backends()}\n"
    )


def test_old_torch_is_named() -> None:
    """A torch that lacks what Orchard needs does not break the import, and is the reason given."""
    fresh(
        "import sys, types\n"
        "fake = types.ModuleType('torch'); fake.__version__ = '1.0'\n"
        "sys.modules['torch'] = fake\n"
        "import orchard\n"
        "try:\n"
        "    orchard.attention\n"
        "except ImportError as error:\n"
        "    assert 'needs a working torch' in str(error)\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
        "assert not hasattr(orchard, '__wrapped__')\n"
    )
