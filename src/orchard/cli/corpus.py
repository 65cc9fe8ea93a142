"""The text the demo trains on: years in an orchard, made by a small grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

YEARS = 70
_SEED = 1


@dataclass(frozen=True)
class Season:
    """The phrases of a quarter of the year."""

    times: tuple[str, ...]
    skies: tuple[str, ...]
    changes: tuple[str, ...]
    work: tuple[str, ...]
    visits: tuple[str, ...]  # with the visitor


SEASONS = (
    Season(
        times=("in early spring", "when the frost has gone", "on a mild morning in April"),
        skies=("soft rain falls on the hill", "the wind turns to the west", "the light grows long"),
        changes=("opens its first buds", "is white with blossom", "puts out small green leaves"),
        work=("prunes the last dead wood", "sows clover", "ties the young grafts to their stakes"),
        visits=(
            "the first bee looks for flowers",
            "a thrush builds a nest of moss",
            "the brown hare crosses the lane",
        ),
    ),
    Season(
        times=("in high summer", "when the days are long", "on a hot afternoon in July"),
        skies=("the sun stands over the wall", "a warm wind shakes the grass", "no cloud is seen"),
        changes=(
            "carries hard green fruit",
            "throws a deep shade",
            "bends a little more each week",
        ),
        work=("thins the crowded fruit", "brings water in two pails", "cuts the tall grass"),
        visits=(
            "the bees hum from dawn to dusk",
            "the grey cat sleeps in the shade",
            "a blackbird steals the sweet berries",
        ),
    ),
    Season(
        times=("in autumn", "when the mist lies late", "on a gold day in October"),
        skies=("the evening comes early", "a cold wind takes the leaves", "the fields are brown"),
        changes=("is heavy with ripe fruit", "turns red and yellow", "drops its windfalls"),
        work=("fills basket after basket", "sets the ladder with care", "presses the cider"),
        visits=(
            "the wasps feed on the fallen fruit",
            "the swallows fly south over the hill",
            "a red squirrel hides nuts under the roots",
        ),
    ),
    Season(
        times=("in the depth of winter", "when the pond is frozen", "on a still day in January"),
        skies=(
            "snow covers the lane",
            "the stars are sharp at night",
            "grey light fills the valley",
        ),
        changes=("stands bare and black", "holds a line of snow", "rests without a sound"),
        work=("mends the baskets by the fire", "sharpens the saws", "sorts the stored fruit"),
        visits=(
            "a fox leaves tracks in the snow",
            "the robin sings one thin song",
            "the hedgehog sleeps below the hedge",
        ),
    ),
)
TREES = ("apple tree", "pear tree", "plum tree", "quince", "cherry tree", "medlar")
AGES = ("old", "young", "tall", "crooked", "proud")
PLACES = ("by the gate", "near the well", "along the wall", "behind the barn", "on the slope")
PEOPLE = ("the keeper", "her daughter", "the neighbour", "the boy from the mill")


def text(years: int = YEARS) -> str:
    """The whole text; the same on every machine and in every version of Python."""
    random = Random(_SEED)
    paragraphs = [_paragraph(random, season) for _ in range(years) for season in SEASONS]
    return "\n\n".join(paragraphs) + "\n"


def _pick(random: Random, choices: Sequence[str]) -> str:
    # Only the sequence of random() is promised to stay the same; that of choice() is not.
    return choices[int(random.random() * len(choices))]


def _paragraph(random: Random, season: Season) -> str:
    sentences = [
        f"{_pick(random, season.times)}, {_pick(random, season.skies)}",
        f"{_tree(random)} {_pick(random, season.changes)}",
        f"{_pick(random, PEOPLE)} {_pick(random, season.work)} {_pick(random, PLACES)}",
        _pick(random, season.visits),
        f"{_tree(random)} {_pick(random, season.changes)}, and {_pick(random, season.skies)}",
    ]
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def _tree(random: Random) -> str:
    return f"the {_pick(random, AGES)} {_pick(random, TREES)} {_pick(random, PLACES)}"
