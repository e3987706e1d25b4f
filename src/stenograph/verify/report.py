"""Prints a verification for a person: a table, and the first difference with its ids and their text.

Knows nothing of the checks themselves.
"""

from collections.abc import Iterable, Iterator, Sequence

from stenograph.text.append_proof import Rewrite
from stenograph.verify.findings import Check, ConversationKind, Difference, Finding
from stenograph.verify.live_session import LiveSession
from stenograph.verify.verify import Verification

_LABEL_CHARS = 16
_TURN_CHARS = 24
_COLUMN_CHARS = 10
_SHOWN_CHARS = 1200
"""Characters shown of a problem's text; some quote whole replies."""

_COLUMNS = (Check.HISTORY, Check.BRIDGE, Check.PARSE, Check.PARTS, Check.BOUNDARY, Check.RETRY)


def found_lines(found: Verification) -> Iterator[str]:
    """The table, and beneath it the first difference of each failed check."""
    proof = found.proof
    yield _row("append-only", ["holds" if proof.holds else "BROKEN"], f"{proof.num_checked} renders compared")
    injection = [finding for finding in found.findings if finding.check is Check.INJECTION]
    yield _row("injection", ["holds" if not _num_failed(injection) else "BROKEN"], "control tokens in a user's text")
    yield ""
    yield _row("conversations", [check.value for check in _COLUMNS])
    matrix = [finding for finding in found.findings if finding.check in _COLUMNS]
    for kind in ConversationKind:
        yield _row(kind.value, _cells([finding for finding in matrix if kind in finding.kinds]))
    yield _row("all", _cells(matrix))
    if found.num_tolerated:
        yield f"{found.num_tolerated} bridged lines differ from a render only in which tokens spell a reply: tolerated."
    if num_refused := proof.num_refused + found.num_refused:
        yield f"{num_refused} renders were refused by the template: such a turn gets 400."
    if proof.refusal is not None:
        yield ""
        yield f"append-only: {proof.why_not}"
    if proof.rewrites:
        yield ""
        yield from _rewrite_lines(proof.rewrites[0])
    for check in Check:
        first = next((one for one in found.failures if one.check is check), None)
        if first is not None:
            yield ""
            yield from finding_lines(first)


def live_lines(live: LiveSession) -> Iterator[str]:
    """The turns of a session with a real engine, and the reason of its break, if any."""
    yield f"live session: {live.engine}"
    yield _turn_row("turn", ["prompt", "kept", "sampled"], "ended by")
    for turn in live.turns:
        numbers = [str(turn.num_prompt), str(turn.num_kept), str(turn.num_sampled)]
        yield _turn_row(turn.name, numbers, f"{turn.ended_by}{'' if turn.finding is None else '  BROKEN'}")
    yield from live.notes
    for turn in live.turns:
        if turn.finding is not None:
            yield ""
            yield from finding_lines(turn.finding)
    if live.broke:
        yield ""
        yield f"The session could not go on: {live.broke}"


def finding_lines(finding: Finding) -> Iterator[str]:
    """One failure."""
    yield f"{finding.check.value}, first difference: [{finding.conversation}]"
    yield f"  {finding.problem[:_SHOWN_CHARS]}{'…' if len(finding.problem) > _SHOWN_CHARS else ''}"
    if finding.difference is not None:
        yield from _difference_lines(finding.difference)


def _difference_lines(difference: Difference) -> Iterator[str]:
    yield f"  the line differs from id {difference.at} on (counted from 0):"
    yield f"  {'at':>8}  {'template writes':<34}session has"
    for offset in range(max(len(difference.expected), len(difference.actual))):
        at = difference.first + offset
        sides = [_token(side, offset) for side in (difference.expected, difference.actual)]
        yield f"{'->' if at == difference.at else '  '}{at:>8}  {sides[0]:<34}{sides[1]}"


def _rewrite_lines(rewrite: Rewrite) -> Iterator[str]:
    yield f"append-only ({rewrite.law.value}), first difference: [{rewrite.conversation}]"
    yield f"  {rewrite.why}; at character {rewrite.at} of the conversation's text"
    yield f"  before: {rewrite.expected!r}"
    yield f"  after:  {rewrite.actual!r}"


def _token(side: Sequence[tuple[int, str]], offset: int) -> str:
    if offset >= len(side):
        return "(no more)"
    id_, text = side[offset]
    return f"{id_:>7} {text!r}"


def _cells(findings: Sequence[Finding]) -> list[str]:
    """Number of findings of each check, passed or failed."""
    return [_cell([finding for finding in findings if finding.check is check]) for check in _COLUMNS]


def _cell(findings: Sequence[Finding]) -> str:
    if not findings:
        return "-"
    num_failed = _num_failed(findings)
    return f"{num_failed} FAIL" if num_failed else str(len(findings))


def _num_failed(findings: Iterable[Finding]) -> int:
    return sum(bool(finding.problem) for finding in findings)


def _turn_row(label: str, cells: Sequence[str], note: str) -> str:
    return _row(f"{label:<{_TURN_CHARS}}", cells, note)


def _row(label: str, cells: Sequence[str], note: str = "") -> str:
    shown = "".join(f" {cell:>{_COLUMN_CHARS - 1}}" for cell in cells)
    return f"{label:<{_LABEL_CHARS}}{shown}{'  ' if note else ''}{note}".rstrip()
