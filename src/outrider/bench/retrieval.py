"""Prompts that ask for one of many facts, of any length: notes about invented people, a question.

What a note says depends on the prompt's number and the note's place alone, through a hash, so every
machine has the same prompts and none need be shipped. No two notes of a prompt are about the same
person and thing, so each question has one answer, which the text holds word for word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

_NAMES = (
    "Ada Berg", "Amos Keller", "Anna Lind", "Boris Hale", "Carla Moor", "Cyril Nash",
    "Dora Finch", "Edda Roth", "Emil Stone", "Frieda Wells", "Gideon Park", "Greta Olsen",
    "Hanna Price", "Igor Vane", "Ines Falk", "Jonas Reed", "Karin Holt", "Leo Marsh",
    "Lotte Brandt", "Marta Quist", "Nils Ford", "Olga Trent", "Otto Weir", "Paula Storm",
    "Quentin Dale", "Rosa Lake", "Simon Fells", "Thea Grove", "Ulf Barden", "Vera Nyland",
    "Walter Cross", "Yara Dunn",
)  # fmt: skip
_THINGS = (
    "the boat shed", "the bicycle cellar", "the archive", "the greenhouse", "the piano room",
    "the workshop", "the east gate", "the map cabinet", "the kitchen store", "the lamp room",
    "the bell tower", "the reading hall", "the seed bank", "the pump house", "the film library",
    "the guest house",
)  # fmt: skip
_PLACES = (
    "behind the clock in the hall", "in the blue tin on the third shelf", "under the stairs",
    "in the drawer marked with a star", "on the hook beside the oven", "inside the old atlas",
    "in the coat with brass buttons", "below the loose stone at the well", "in the violin case",
    "on top of the tall cupboard", "in the jar of dried beans", "at the harbour office",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# So many different notes there are for one prompt.
MOST_NOTES = len(_NAMES) * len(_THINGS)


def retrieval_prompt(number: int, num_notes: int) -> str:
    """Notes, then a question about one of them. More than MOST_NOTES are cut to that."""
    subjects = _subjects(number)[:num_notes]
    asked = _draw(range(len(subjects)), number, "asked")
    notes = [_note(number, name, thing) for name, thing in subjects]
    name, thing = subjects[asked]
    question = f"Where does {name} keep the key to {thing}?"
    return "Notes of the caretaker.\n" + "\n".join(notes) + f"\n\nQuestion: {question}\nAnswer:"


def _note(number: int, name: str, thing: str) -> str:
    place = _draw(_PLACES, number, name, thing)
    day = _draw(_DAYS, number, name, thing, "day")
    return f"{name} keeps the key to {thing} {place}, and needs it on {day}."


@lru_cache(maxsize=128)
def _subjects(number: int) -> list[tuple[str, str]]:
    """All of them, in an order of the prompt's own."""
    pairs = [(name, thing) for name in _NAMES for thing in _THINGS]
    return sorted(pairs, key=lambda pair: _digest(number, *pair))


def _draw(options: Sequence[T], *key: object) -> T:
    return options[int.from_bytes(_digest(*key)[:8]) % len(options)]


def _digest(*key: object) -> bytes:
    return hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
