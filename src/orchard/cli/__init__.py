"""The command line: `orchard` or `python -m orchard`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import orchard
from orchard.errors import OrchardError

COMMANDS = {
    "doctor": "say what is here: python, torch, devices, backends and why not",
    "verify": "run the conformance suite on this machine",
    "bench": "time Orchard and torch side by side, with correctness",
    "tune": "find blocks for the CUDA kernels on the GPU that is here",
    "demo": "train a small GPT through Orchard and through torch",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its module is imported only then, for doctor has to do without torch."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    broken = vars(orchard).get("_import_error")
    if broken is not None and chosen in COMMANDS and chosen != "doctor":
        message = f"orchard {chosen} needs a working torch: {broken}\n`orchard doctor` says more."
        print(message, file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="orchard", description=orchard.__doc__)
    parser.add_argument("--version", action="version", version=f"orchard {orchard.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary)
        if name == chosen:
            module = importlib.import_module(f"orchard.cli.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(words)
    args.words = words
    try:
        return int(args.run(args))
    except (OrchardError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has gone
            return 141
        print(f"orchard {chosen}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
