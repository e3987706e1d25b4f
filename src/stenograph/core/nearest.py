"""The known name meant by a mistyped one: of a request's field, a flag or a setting. Pure."""

import re
from collections.abc import Iterable

LONGEST_NAME = 64
"""Longer than any name of ours; a longer text is shown cut."""

_SHORT_WORD, _LONG_WORD, _MOST_SLIPS = 4, 6, 2
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])|[^\W_a-zA-Z0-9]+")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name clearly meant by `name`, or None.

    A wrong hint costs more than none, so only a slip of the pen is matched: other case or separators, a plural, two
    letters swapped, a letter or two in a long word. Short words (max, min, top) must be right, and no two known names
    may be equally near.
    """
    if len(name) > LONGEST_NAME:  # the search costs as much as the name is long
        return None
    close = [(slips, one) for one in known if (slips := _slips(_words(name), _words(one))) is not None]
    best = [one for slips, one in close if slips == min(close)[0]]
    return best[0] if len(best) == 1 else None


def _words(name: str) -> list[str]:
    """The words of a name in snake, kebab or camel case."""
    return [word.lower() for word in _WORD.findall(name)]


def _slips(given: list[str], known: list[str]) -> int | None:
    """Number of slips from one name to the other; None if they are different names."""
    whole_given, whole_known = "".join(given), "".join(known)
    if whole_given == whole_known:
        return 0
    if len(given) != len(known):
        return None
    slips = [_slips_in_word(one, other) for one, other in zip(given, known, strict=True)]
    return sum(slips) if sum(slips) <= _MOST_SLIPS else None


def _slips_in_word(one: str, other: str) -> int:
    if one == other:
        return 0
    if one + "s" == other or other + "s" == one:
        return 1
    distance, length = _distance(one, other), min(len(one), len(other))
    is_swapped = length >= _SHORT_WORD and distance == 1 and sorted(one) == sorted(other)
    is_near = length >= _LONG_WORD and (distance == 1 or (distance == _MOST_SLIPS and one[0] == other[0]))
    return distance if is_swapped or is_near else _MOST_SLIPS + 1


def _distance(one: str, other: str) -> int:
    """Letters added, left out, exchanged, or changed in places with the next (optimal string alignment)."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, start=1):
        row = [i]
        for j, b in enumerate(other, start=1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
