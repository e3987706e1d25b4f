"""The rules for rewriting requests, as data: the parts to drop, and the parts to pin.

They stand in the files of kinds' rules (side_rules.py): `side.toml` is shipped, and an operator's own in front of it. A
rule has `name`, `client` and `seen` (versions of the client); those with `default = true` hold unless a session says
otherwise, the others where it names them. A rule replaces those of its name in later files.

- `[[drop]]` cuts each of the first `num_blocks` blocks of the system text if the regular expression `block` matches at
  its beginning.
- `[[pin]]` makes one of openings that differ only there: at `place` `system` or `first_user`, in the matches of the
  regular expression `match`, if the text begins as `begins` says (left out: however it begins); at `tool_text` in the
  descriptions of tools. The stored spelling stands.

Knows no session and no request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from stenograph.session.kinds import Name
from stenograph.session.side_rules import BadSideRules, converted, file_of, regex_of
from stenograph.trajectory.canonical import Canonical, DropRule, PinPlace, PinRule

DEFAULT, OFF = "default", "off"
"""A choice of the rules on by default, or of none. Names are a choice of these and the default ones."""

_Rule = TypeVar("_Rule", DropRule, PinRule)


class DropFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A drop rule, as it stands in a file."""

    name: Name
    client: Name
    block: str
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]
    default: bool = False
    seen: list[str] = []
    unshown: bool = False


class PinFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A pin rule, as it stands in a file."""

    name: Name
    client: Name
    place: PinPlace
    begins: str | None = None
    match: str | None = None
    default: bool = False
    seen: list[str] = []
    unshown: bool = False


class UnknownRewrite(ValueError):
    """A choice names a rule missing from all files; `known` are the existing ones."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no rule {name[:80]!r}; known are {', '.join(known)}")
        self.name = name
        self.known = tuple(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRule:
    """A rule with its description."""

    rule: DropRule | PinRule
    client: str
    seen: tuple[str, ...]
    is_default: bool
    unshown: bool


class RewriteRules:
    """All rules in their order."""

    def __init__(self, rules: Sequence[RewriteRule]) -> None:
        self.rules = tuple(rules)

    def __repr__(self) -> str:
        return f"<RewriteRules {', '.join(self.names)}>"

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(one.rule.name for one in self.rules)

    @classmethod
    def read(cls, *texts: str) -> "RewriteRules":
        """Read TOML files, the first ones in front. Raises BadSideRules."""
        rules: dict[str, RewriteRule] = {}
        for text in texts:
            file = file_of(text)
            own: dict[str, RewriteRule] = {}
            read = [_drop_of(given, index) for index, given in enumerate(file.drop)]
            read += [_pin_of(given, index) for index, given in enumerate(file.pin)]
            for one in read:
                name = one.rule.name
                if name in own:
                    raise BadSideRules(rule=name, field="name", problem="another rule of this file has it")
                if name in (DEFAULT, OFF) or "," in name or name.strip() != name:
                    problem = f"{DEFAULT!r}, {OFF!r}, and what has a comma or outer white space, is no name of a rule"
                    raise BadSideRules(rule=name, field="name", problem=problem)
                own[name] = one
            rules |= {name: one for name, one in own.items() if name not in rules}
        return cls(tuple(rules.values()))

    def chosen(self, choice: str) -> Canonical:
        """The rules of a choice: `default`, `off`, or names with commas between, in addition to the default.

        Raises UnknownRewrite.
        """
        names = {one.rule.name for one in self.rules if one.is_default}
        if choice == OFF:
            names.clear()
        elif choice != DEFAULT:
            for name in map(str.strip, choice.split(",")):
                if name not in self.names:
                    raise UnknownRewrite(name, [DEFAULT, OFF, *self.names])
                names.add(name)
        rules = [one.rule for one in self.rules if one.rule.name in names]
        return Canonical(drops=_those_of(rules, DropRule), pins=_those_of(rules, PinRule))


def _those_of(rules: Sequence[DropRule | PinRule], kind: type[_Rule]) -> tuple[_Rule, ...]:
    return tuple(rule for rule in rules if isinstance(rule, kind))


def _drop_of(given: dict[str, object], index: int) -> RewriteRule:
    name = _name_of(given, index)
    fields = converted(given, DropFields, name, "the rule")
    rule = DropRule(name=name, block=regex_of(fields.block, name, "block"), num_blocks=fields.num_blocks)
    return _with_facts(rule, fields)


def _pin_of(given: dict[str, object], index: int) -> RewriteRule:
    name = _name_of(given, index)
    fields = converted(given, PinFields, name, "the rule")
    is_tool = fields.place is PinPlace.TOOL_TEXT
    if is_tool != (fields.match is None):
        problem = "there is none with place 'tool_text', and one with every other"
        raise BadSideRules(rule=name, field="match", problem=problem)
    if is_tool and fields.begins is not None:
        raise BadSideRules(rule=name, field="begins", problem="there is none with place 'tool_text'")
    pattern = None if fields.match is None else regex_of(fields.match, name, "match")
    if pattern is not None and pattern.match("") is not None:
        raise BadSideRules(rule=name, field="match", problem="it matches an empty text")
    begins = None if fields.begins is None else regex_of(fields.begins, name, "begins")
    return _with_facts(PinRule(name=name, place=fields.place, begins=begins, pattern=pattern), fields)


def _with_facts(rule: DropRule | PinRule, fields: DropFields | PinFields) -> RewriteRule:
    return RewriteRule(
        rule=rule,
        client=fields.client,
        seen=tuple(fields.seen),
        is_default=fields.default,
        unshown=fields.unshown,
    )


def _name_of(given: dict[str, object], index: int) -> str:
    name = given.get("name")
    return name if isinstance(name, str) else f"number {index + 1}"
