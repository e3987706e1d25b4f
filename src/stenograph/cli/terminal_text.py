"""Text written by others, made safe for a terminal: nothing in it can move the cursor, change a colour or turn text
around.

Control characters are shown as their pictures, and so stay visible. Pure.
"""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_C0 = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\N{SYMBOL FOR DELETE}"}
"""Pictures of control characters. Source: Unicode, "Control Pictures"."""

_OTHERS = (
    *range(0x80, 0xA0),  # C1: one of them begins escape sequences in eight bits
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # they turn text around
    *(0x2028, 0x2029),
    *range(0xD800, 0xE000),  # surrogates, which cannot be written
)
_IN_A_LINE = _C0 | dict.fromkeys(_OTHERS, _REPLACEMENT)
_IN_TEXT = {code: picture for code, picture in _IN_A_LINE.items() if chr(code) not in "\n\t"}


def safe_text(text: str) -> str:
    """Text of several lines, without control characters but line feed and tab."""
    return text.translate(_IN_TEXT)


def safe_line(text: str) -> str:
    """Text without any control character, within its one line."""
    return text.translate(_IN_A_LINE)
