"""Find blocks for the general CUDA kernels on the GPU that is here, and keep them.

Every config is checked against fp64 before it is timed. The best one of a kernel is kept where it
is faster than what the tables have, in a table of yours that goes before the shipped one. Nothing
is ever searched inside a call. The kernels for Hopper have configs of their own, which this leaves
alone. Exit status 2: there is no GPU, or no Triton.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from orchard.cli.bench import DTYPES, positive_seconds
from orchard.cli.console import print_table, progress

if TYPE_CHECKING:
    from orchard.testing.benchmark import Case
    from orchard.testing.cuda_tuning import Tuned

SHAPES = ("4,16,4096,64", "4,16,4096,128", "8,32/8,1x16384,128")
HEADERS = ("kernel", "head block", "before", "best", "before / best", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        action="append",
        type=_shape,
        metavar="B,H,S,D",
        help="batch, heads, length and head dimension; heads may be QUERY/KEY, the length "
        f"ROWSxKEYS; may be repeated (default: {' and '.join(SHAPES)})",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--causal", action="store_true", help="with a causal mask")
    parser.add_argument("--backward", action="store_true", help="the kernels of the backward too")
    parser.add_argument(
        "--only", action="append", metavar="KERNEL", type=_role, help="this kernel; may be repeated"
    )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=0.2,
        help="for the best beside what is there (default: 0.2)",
    )
    parser.add_argument(
        "--table", type=Path, help="where to keep what is found (default: a file of yours)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print, and keep nothing")


def _shape(text: str) -> Case:
    from orchard.testing.benchmark import Case

    match = re.fullmatch(r"(\d+),(\d+)(?:/(\d+))?,(\d+)(?:x(\d+))?,(\d+)", text)
    if match is None or "0" in (found := match.groups(default="")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not B,H,S,D, such as 4,16,4096,128 or 8,32/8,1x16384,128"
        )
    batch, heads, kv_heads, rows, keys, dim = found
    case = Case(
        text,
        batch=int(batch),
        heads=int(heads),
        kv_heads=int(kv_heads or heads),
        rows=int(rows),
        keys=int(keys or rows),
        dim=int(dim),
        value_dim=int(dim),
    )
    if case.heads % case.kv_heads:
        raise argparse.ArgumentTypeError(f"{text!r}: {kv_heads} does not divide {heads} heads")
    return case


def _role(name: str) -> str:
    from orchard.backends.cuda.configs import Role

    roles = [role for role in get_args(Role) if role != "grad_mask"]
    if name not in roles:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(roles)}")
    return name


def run(args: argparse.Namespace) -> int:
    import torch

    from orchard.backends.cuda import configs
    from orchard.testing.cuda_tuning import Workbench, candidates, open_runtime, tune
    from orchard.text import one_line

    if not torch.cuda.is_available():
        print(f"orchard tune: torch {torch.__version__} sees no NVIDIA GPU here", file=sys.stderr)
        return 2
    try:
        runtime = open_runtime()
    except (ImportError, RuntimeError) as error:
        print(f"orchard tune: Triton does not work here: {one_line(error)}", file=sys.stderr)
        return 2
    device, path = torch.device("cuda", torch.cuda.current_device()), args.table
    path = path or configs.user_table()
    for case in _cases(args):
        bench = Workbench(runtime, case, device)
        roles = [role for role in bench.roles if not args.only or role in args.only]
        total = sum(len(candidates(bench.entry(r), bench.config(r, {}))) for r in roles)
        with progress(f"tune {case.sizes}", total) as step:
            found = tune(bench, roles, args.seconds, note=step)
        print_table(f"{case.sizes} on {bench.family}", HEADERS, [_cells(each) for each in found])
        better = {each.entry: each.best for each in found if each.better}
        if better and not args.dry_run:
            configs.write(path, bench.family, better)
            print(f"Kept: {path}")
    return 0


def _cases(args: argparse.Namespace) -> list[Case]:
    import torch

    dtype = getattr(torch, args.dtype)
    return [
        replace(case, dtype=dtype, causal=args.causal, backward=args.backward)
        for case in args.shape or map(_shape, SHAPES)
    ]


def _cells(found: Tuned) -> list[str]:
    ratio, useless = found.ratio, [trial for trial in found.trials if trial.seconds is None]
    return [
        found.entry.role,
        f"{found.entry.head_block}, {found.entry.size}",
        str(list(found.before)),
        str(list(found.best)),
        "-" if ratio is None else f"{ratio.p50:.2f} ({ratio.p20:.2f}-{ratio.p80:.2f})",
        f"{len(found.trials)} tried, {len(useless)} of no use",
    ]
