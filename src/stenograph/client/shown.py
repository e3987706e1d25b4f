"""Values as a person sees them: one line for a prompt, a table for a notebook. Agents' texts are escaped. Pure."""

import html
from collections.abc import Iterable, Mapping, Sequence

MOST_CHARS = 80
"""The longest text of somebody else's in a line; longer ones are cut."""


def printable(text: str) -> str:
    """`text` with control characters, but for line ends and tabs, spelled as escapes: a terminal obeys none of it."""
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


def one_line(text: str) -> str:
    """`text` in one line, cut to `MOST_CHARS`."""
    flat = printable(" ".join(text[: 4 * MOST_CHARS].split()))
    return flat if len(flat) <= MOST_CHARS and len(text) <= 4 * MOST_CHARS else f"{flat[: MOST_CHARS - 1]}…"


def repr_line(value: object) -> str:
    """The repr of somebody else's value in one line; its class if it has no repr to show."""
    try:
        return one_line(repr(value))
    except Exception:  # noqa: BLE001 - a repr that fails hides nothing else
        return f"<{type(value).__name__}>"


def error_line(error: BaseException) -> str:
    """An error's class and message in one line."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - as above
        message = ""
    return one_line(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def reward_text(reward: float | Mapping[str, float] | None) -> str:
    """A reward, or rewards by name, rounded."""
    if isinstance(reward, Mapping):
        return one_line(", ".join(f"{name} {number:.4g}" for name, number in reward.items()))
    return "none" if reward is None else f"{reward:.4g}"


def html_page(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, below: str = "") -> str:
    """A title, a table, and `below` as preformatted text. Everything is escaped."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(printable(str(cell)))}</td>' for cell in row)}</tr>" for row in rows
    )
    end = f"<pre>{html.escape(printable(below))}</pre>" if below else ""
    return (
        f"<p>{html.escape(printable(title))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{end}"
    )
