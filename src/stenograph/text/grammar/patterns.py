"""Patterns: the forms of a text as a small tree, and the tree as GBNF or as a regular expression.

Owns both notations, as narrow as every engine reads them: names of letters, digits and hyphens; no escape missing in
either. A regular expression has no rules, so a rule within itself is written out to a fixed depth, and admits less
there. Knows no schema and no family. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

ROOT = "root"
MAX_DEPTH = 2
"""Depth of a rule within itself in a regular expression."""
MAX_CHARS = 64 * 1024
"""Longest regular expression: every reused part is written out again."""
MAX_PARTS = 64 * 1024
"""Most parts of one, too deep ones included: schemas with references to each other have many."""

_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_IN_GBNF = re.compile(r'["\\\n\r\t]')
_IN_REGEX = re.compile(r"[\\.^$*+?()\[\]{}|\n\r\t]")
_IN_CLASS = re.compile(r"[\\\[\]]")
_TIMES = {(0, 1): "?", (0, None): "*", (1, None): "+"}


class Unwritable(ValueError):
    """A text's forms cannot be told by a pattern; the message says why, as a clause."""


@dataclass(frozen=True, slots=True)
class Literal:
    """One text."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of the ranges, each first and last; with `others`, one of none of them."""

    ranges: Sequence[tuple[str, str]]
    others: bool = False


@dataclass(frozen=True, slots=True)
class Seq:
    """One part after another."""

    parts: Sequence["Pattern"]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the options, at least one."""

    options: Sequence["Pattern"]


@dataclass(frozen=True, slots=True)
class Repeated:
    """The same again and again; `most` None: without end."""

    of: "Pattern"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class RuleName:
    """A rule, by its name."""

    name: str


Pattern: TypeAlias = Literal | Chars | Seq | Either | Repeated | RuleName


def seq(*parts: Pattern) -> Pattern:
    """One part after another."""
    return parts[0] if len(parts) == 1 else Seq(parts)


def either(*options: Pattern) -> Pattern:
    """One of the options."""
    return options[0] if len(options) == 1 else Either(options)


def optional(pattern: Pattern) -> Pattern:
    """It, or nothing."""
    return Repeated(pattern, 0, 1)


def text_without(words: Sequence[str], *, is_empty_too: bool = True, not_first: str = "") -> Pattern:
    """Any text without any of `words`, and without a character of `not_first` at its start.

    `words` begin alike. A word with its first character repeated stands for its part before the repetition: a little
    more is kept out than need be.
    """
    first = words[0][0]
    tree = _tree([_before_again(word) for word in words])
    prefix, miss = _prefixes(tree), _misses(tree, first)
    assert prefix is not None
    assert miss is not None, "a word has two characters at least before its first comes again"
    off = Chars([(first, first)], others=True)
    inner = Seq([Repeated(prefix, 0, None), miss])
    rest = Seq([Repeated(Either([off, inner]), 0, None), Repeated(prefix, 0, None)])
    begin = Chars([(char, char) for char in dict.fromkeys((first, *not_first))], others=True)
    at_once: list[Pattern] = [] if first in not_first else [Seq([inner, rest]), Repeated(prefix, 1, None)]
    filled = either(Seq([begin, rest]), *at_once)
    if not is_empty_too:
        return filled
    return optional(filled) if not_first else rest


def as_gbnf(rules: Mapping[str, Pattern]) -> str:
    """The rules as GBNF, `root` first."""
    return "\n".join(f"{name} ::= {_gbnf(pattern)}" for name, pattern in {ROOT: rules[ROOT], **rules}.items()) + "\n"


def as_regex(rules: Mapping[str, Pattern]) -> str:
    """The rule `root` as a regular expression. Raises Unwritable: it has no end, or is too long."""
    written = _RegexWriter(rules).write(RuleName(ROOT))
    if written is None:
        raise Unwritable("a schema contains itself without an end")
    return written


# -- text without words

_Tree: TypeAlias = "dict[str, _Tree]"


def _before_again(word: str) -> str:
    again = word.find(word[0], 1)
    return word if again < 0 else word[:again]


def _tree(words: Sequence[str]) -> _Tree:
    """The words by their characters, without any with another as its beginning."""
    root: _Tree = {}
    for word in sorted(words, key=len, reverse=True):
        at = root
        for char in word[:-1]:
            at = at.setdefault(char, {})
        at[word[-1]] = {}
    return root


def _prefixes(tree: _Tree) -> Pattern | None:
    """A proper beginning of a word, of one character at least; None where all words have but one."""
    found = [(Literal(char), _prefixes(below)) for char, below in tree.items() if below]
    return either(*(char if more is None else seq(char, optional(more)) for char, more in found)) if found else None


def _misses(tree: _Tree, first: str) -> Pattern | None:
    """Such a beginning and one character more, neither the next of a word nor the first of one."""
    found: list[Pattern] = []
    for char, below in tree.items():
        if below:
            other = Chars([(one, one) for one in dict.fromkeys((first, *below))], others=True)
            more = _misses(below, first)
            found.append(seq(Literal(char), other if more is None else either(other, more)))
    return either(*found) if found else None


# -- GBNF


def _gbnf(pattern: Pattern) -> str:
    match pattern:
        case Literal(text):
            if _CONTROL.search(text):
                raise Unwritable("a text has a control character, for which GBNF has no one spelling")
            return f'"{_IN_GBNF.sub(_escaped, text)}"'
        case Chars():
            return _char_class(pattern)
        case Seq(parts):
            return " ".join(_gbnf_part(part) for part in parts)
        case Either(options):
            return " | ".join(map(_gbnf, options))
        case Repeated(of, least, most):
            return f"{_gbnf(of) if isinstance(of, Chars | RuleName) else f'({_gbnf(of)})'}{_count(least, most)}"
        case RuleName(name):
            return name


def _gbnf_part(pattern: Pattern) -> str:
    return f"({_gbnf(pattern)})" if isinstance(pattern, Either) else _gbnf(pattern)


# -- a regular expression


class _RegexWriter:
    """Writes out rules. None: no text is of a pattern, as it goes too deep."""

    def __init__(self, rules: Mapping[str, Pattern]) -> None:
        self._rules = rules
        self._within: list[str] = []
        self._num_left = MAX_PARTS

    def write(self, pattern: Pattern) -> str | None:
        self._num_left -= 1
        written = self._write(pattern) if self._num_left else ""
        if not self._num_left or (written is not None and len(written) > MAX_CHARS):
            raise Unwritable(f"its regular expression has more than {MAX_CHARS} characters")
        return written

    def _write(self, pattern: Pattern) -> str | None:
        match pattern:
            case Literal(text):
                return _IN_REGEX.sub(_escaped, text)
            case Chars():
                return _char_class(pattern)
            case Seq(parts):
                written = [self.write(part) for part in parts]
                return None if None in written else "".join(filter(None, written))
            case Either(options):
                found = [one for one in map(self.write, options) if one is not None]
                return f"(?:{'|'.join(found)})" if found else None
            case Repeated():
                return self._write_times(pattern)
            case RuleName(name):
                return self._write_rule(name)

    def _write_times(self, pattern: Repeated) -> str | None:
        once, count = self.write(pattern.of), _count(pattern.least, pattern.most)
        if once is None:
            return None if pattern.least else ""
        return f"{once}{count}" if isinstance(pattern.of, Chars) else f"(?:{once}){count}"

    def _write_rule(self, name: str) -> str | None:
        if self._within.count(name) > MAX_DEPTH:
            return None
        self._within.append(name)
        written = self.write(self._rules[name])
        self._within.pop()
        return written


# -- both


def _count(least: int, most: int | None) -> str:
    exact = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
    return _TIMES.get((least, most), exact)


def _char_class(chars: Chars) -> str:
    ranges = (_in_class(a) if a == b else f"{_in_class(a)}-{_in_class(b)}" for a, b in chars.ranges)
    return f"[{'^' if chars.others else ''}{''.join(sorted(ranges, key='-'.__eq__))}]"  # a hyphen is itself at the end


def _in_class(char: str) -> str:
    return f"\\x{ord(char):02x}" if char < " " else _IN_CLASS.sub(_escaped, char)


def _escaped(found: "re.Match[str]") -> str:
    return _NAMED.get(found[0], f"\\{found[0]}")
