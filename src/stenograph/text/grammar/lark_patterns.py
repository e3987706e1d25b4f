"""The grammar of a forced call, from llguidance's Lark, for engines with GBNF or regular expressions alone.

Reads our families' own Lark, no other, and so knows just its forms. A marker with a token of its own is its text here:
those engines hold the reply's text, and our parsers read it however it was tokenized. Pure.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence

from stenograph.core.types import Grammar, GrammarKind
from stenograph.text.element_calls import OPEN_STRING
from stenograph.text.grammar.json_patterns import MAX_SCHEMA_CHARS, json_rules
from stenograph.text.grammar.patterns import (
    ROOT,
    Chars,
    Literal,
    Pattern,
    Repeated,
    RuleName,
    Unwritable,
    as_gbnf,
    as_regex,
    either,
    seq,
    text_without,
)

_RULE = re.compile(r"(\w+)(?:\[lazy\])?: *(.*)")
_JSON = "%json "
_REGEX = r"/(?:[^/\\]|\\.)*/"
_ITEM = re.compile(
    rf'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<regex>{_REGEX}(?:\s*&\s*~{_REGEX})*)|<\[(?P<id>\d+)\]>|<(?P<token>[^<>\s]+)>'
    r"|(?P<name>\w+)|(?P<sign>[()|?*+]))"
)
_SIGNS: Mapping[str, tuple[int, int | None]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_NUMBER = re.compile(r"\d+")

_COUNTED = re.compile(r"\[((?:\w-\w)+)\]\{(\d+)(?:,(\d+))?\}")
_UP_TO = re.compile(r"\(\?s:\.\*\)(.+)")
_ANY_TEXT = re.compile(r"\(\?s:\.\{(\d+),(\d*)\}\)|\(\?s:\.\)\+")
_WITHIN = re.compile(r"\(\?s:\.\*\)(.+)\(\?s:\.\*\)")
_BEGIN = re.compile(r"[^\\(\[]+\(\?s:\.\*\)")
_BRANCHED = re.compile(r"(.*[^\\])\((.*)\)(.*)")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def in_kinds(grammar: Grammar, kinds: Collection[GrammarKind], added_tokens: Mapping[str, int]) -> Grammar | str:
    """A forced call's Lark as GBNF, else as a regular expression, or a clause that says why it is neither.

    Left as it is where an engine has no grammars of these kinds.
    """
    writers = {GrammarKind.EBNF: as_gbnf, GrammarKind.REGEX: as_regex}
    kind = next((kind for kind in writers if kind in kinds), None)
    if kind is None:
        return grammar
    try:
        return Grammar(kind=kind, source=writers[kind](_Reader(grammar.source, added_tokens).rules))
    except Unwritable as error:
        return str(error)
    except RecursionError:
        return "the parameters are nested too deeply"


class _Reader:
    """Reads all rules at once; each is one line."""

    def __init__(self, source: str, added_tokens: Mapping[str, int]) -> None:
        self.rules: dict[str, Pattern] = {}
        self._texts = {id_: text for text, id_ in added_tokens.items()}
        for line in source.splitlines():
            found = _RULE.fullmatch(line.rstrip())
            assert found is not None, "our rules are lines"
            name = _name(found[1])
            if found[2].startswith(_JSON):
                self._add_json(name, found[2].removeprefix(_JSON))
            else:
                self._items = list(_ITEM.finditer(found[2]))
                self._items.reverse()
                self.rules[name] = self._either()

    def _add_json(self, name: str, schema: str) -> None:
        tool = _NUMBER.search(name)
        assert tool is not None, "a schema's rule has its tool's number"
        try:
            if len(schema) > MAX_SCHEMA_CHARS:
                raise Unwritable(f"there are more than {MAX_SCHEMA_CHARS} characters")
            json_rules(json.loads(schema), name, self.rules)
        except Unwritable as error:
            raise Unwritable(f"in the parameters of /tools/{tool[0]} {error}") from error

    def _either(self) -> Pattern:
        options = [self._seq()]
        while self._items and self._items[-1]["sign"] == "|":
            self._items.pop()
            options.append(self._seq())
        return either(*options)

    def _seq(self) -> Pattern:
        parts: list[Pattern] = []
        while self._items and self._items[-1]["sign"] not in ("|", ")"):
            part = self._one(self._items.pop())
            while self._items and self._items[-1]["sign"] in _SIGNS:
                part = Repeated(part, *_SIGNS[self._items.pop()["sign"]])
            parts.append(part)
        return seq(*parts)

    def _one(self, item: "re.Match[str]") -> Pattern:
        if item["sign"] == "(":
            inner = self._either()
            self._items.pop()
            return inner
        if item["text"] is not None:
            return Literal(json.loads(item["text"]))
        if item["name"] is not None:
            return RuleName(_name(item["name"]))
        if item["regex"] is not None:
            return _of_regexes([body[1:-1] for body in re.findall(_REGEX, item["regex"])])
        return Literal(self._texts[int(item["id"])] if item["token"] is None else f"<{item['token']}>")


def _name(name: str) -> str:
    """A rule's name, as GBNF may have it; terminals differ from rules in their case alone."""
    if name == "start":
        return ROOT
    plain = name.replace("_", "-")
    return f"{plain.lower()}-chars" if name.isupper() else plain


def _of_regexes(bodies: Sequence[str]) -> Pattern:
    """A terminal: the first expression without the others' texts."""
    first, *others = bodies
    if counted := _COUNTED.fullmatch(first):
        ranges = [(one[0], one[2]) for one in re.findall(r"\w-\w", counted[1])]
        return Repeated(Chars(ranges), int(counted[2]), int(counted[3] or counted[2]))
    barred = [found[1] for one in others if (found := _WITHIN.fullmatch(one))]
    if barred and (found := _ANY_TEXT.fullmatch(first)):
        least, most = int(found[1] or 1), found[2]
        if most or least > 1:
            raise Unwritable("a text between tags has a length")
        not_first = "{[" if OPEN_STRING in others else ""  # more than is kept out there
        return text_without(_words(barred[0]), is_empty_too=not least, not_first=not_first)
    if (up_to := _UP_TO.fullmatch(first)) and all(map(_BEGIN.fullmatch, others)):
        (word,) = _words(up_to[1])
        return seq(text_without([word], not_first="".join(one[0] for one in others)), Literal(word))
    raise Unwritable("the model's calls have parts that no other grammar can hold")


def _words(regex: str) -> Sequence[str]:
    """The words of a regular expression of literals, with one branch at most."""
    branched = _BRANCHED.fullmatch(regex)
    all_of = [regex] if branched is None else [branched[1] + one + branched[3] for one in branched[2].split("|")]
    return [_ESCAPE.sub(r"\1", one) for one in all_of]
