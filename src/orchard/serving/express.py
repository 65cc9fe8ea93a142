"""What every request passes through: in C++ where it was built, in Python elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchard.serving.tickets import (
        Desk,
        Entrance,
        Parcel,
        Sleepers,
        Ticket,
        announce_each,
        forget_each,
        settle_each,
    )

    IS_COMPILED: bool
else:
    try:
        from orchard.serving import _express as _found
    except ImportError:  # it was not built, or this interpreter has no global lock
        from orchard.serving import tickets as _found
    IS_COMPILED = _found.__name__.endswith("_express")
    Desk, Entrance, Parcel = _found.Desk, _found.Entrance, _found.Parcel
    Sleepers, Ticket = _found.Sleepers, _found.Ticket
    announce_each, forget_each = _found.announce_each, _found.forget_each
    settle_each = _found.settle_each

__all__ = [
    "IS_COMPILED",
    "Desk",
    "Entrance",
    "Parcel",
    "Sleepers",
    "Ticket",
    "announce_each",
    "forget_each",
    "settle_each",
]
