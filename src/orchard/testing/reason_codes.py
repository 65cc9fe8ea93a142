"""The codes of the reasons that capabilities give, as they stand in the code."""

from __future__ import annotations

import ast
import inspect
import textwrap

from orchard.dispatch.backend import Capability


def capability_codes() -> set[str]:
    """Every code that Capability.reasons gives, read from its calls of `need`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Capability.reasons)))
    return {
        call.args[1].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "need"
        and isinstance(call.args[1], ast.Constant)
        and isinstance(call.args[1].value, str)
    }
