"""A grammar of Qwen's XML calls, in llguidance's Lark, with the white space of the families' templates.

Every text that it admits is read as those arguments (`xml_calls`): so free text has no closing marker of this syntax.
How a schema becomes bare text is not known here (`argument_grammar`).
"""

from collections.abc import Sequence

from stenograph.text.call_syntax import ForcedTool
from stenograph.text.grammar.argument_grammar import argument_rules, plain_name
from stenograph.text.grammar.lark import quoted

_VALUE_END = "\n</parameter>\n"
_MARKERS = ("</parameter>", "</function>")
_NO_MARKER = r"~/(?s:.*)<\/(parameter|function)>(?s:.*)/"


def qwen_xml_grammar(tools: Sequence[ForcedTool], parallel: bool, *, opening: str, closing: str) -> str:
    """One call, or with `parallel` one or more; `opening` and `closing` are the block's markers, as a grammar has them.

    Raises InvalidRequest: a schema, or a name, that calls in this syntax cannot keep.
    """
    frame = _LinesFrame()
    names = " | ".join(f"call_{tool.number}" for tool in tools)
    lines = ["start: one_call" + (' ("\\n" one_call)*' if parallel else ""), f"one_call: {names}"]
    for tool in tools:
        items, rules = argument_rules(tool, frame)
        head, tail = quoted(f"\n<function={plain_name(tool.name)}>\n"), quoted("</function>\n")
        lines.append(f"call_{tool.number}: {opening} {head} {items} {tail} {closing}")
        lines += rules
    return "\n".join([*lines, *frame.text_rules("free_text", 0, None)]) + "\n"


class _LinesFrame:
    """A value on lines of its own."""

    end = quoted(_VALUE_END)

    def head(self, name: str) -> str:
        """Text before the value of that name."""
        return quoted(f"<parameter={name}>\n")

    def tail(self, name: str) -> str:
        """Nothing: a closing tag has no name."""
        del name
        return ""

    def text_rules(self, rule: str, shortest: int, longest: int | None) -> Sequence[str]:
        """The rules of free text of so many characters, up to its end."""
        most = "" if longest is None else longest
        return (
            f"{rule}[lazy]: {rule.upper()} {self.end}",
            f"{rule.upper()}: /(?s:.{{{shortest},{most}}})/ & {_NO_MARKER}",
        )

    def is_read_back(self, value: str) -> bool:
        """Whether a value ends where its closing marker is."""
        return not any(marker in value for marker in _MARKERS)
