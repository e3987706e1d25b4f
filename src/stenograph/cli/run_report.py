"""The report of a run, in lines for a person: turns, strands, tokens, refusals, drift, and the tokens left out."""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import cast

from stenograph.cli.session_calls import ServerCalls

_MAX_STRANDS = 20
_HARMLESS = "assistant_text"


def say(line: str) -> None:
    """A line of ours: stdout is the command's. Where nobody can read it any more it is lost, and all after it: the work
    is done all the same, and the exit code stays the same."""
    try:
        print(f"stenograph: {line}", file=sys.stderr, flush=True)
    except OSError:  # a closed terminal or pipe, which would fail once more at the end of the process
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it is open to the end


def left_out_line(left_out: Mapping[str, object]) -> str:
    """The line about strands in no sample: those without the model's work, as a rule."""
    rows = cast("Mapping[str, Mapping[str, int]]", left_out)
    told = (
        f"{_count(row['strands'], 'strand')} of {kind} ({row['sampled_tokens']:,} sampled tokens)"
        for kind, row in rows.items()
    )
    return f"  left out of the samples: {', '.join(told)}"


def report_lines(calls: ServerCalls, session_id: str) -> Iterator[str]:
    """The lines about a session. Raises CallFailed."""
    metadata, rows = calls.view(session_id), calls.ledger(session_id)
    strands = cast("list[dict[str, object]]", metadata["strands"])
    sampled = sum(cast("int", row["sampled_tokens"]) for row in rows)
    if not strands:
        yield f"session {session_id}: no turn was made" + ("" if rows else "; the command sent the session no request")
    else:
        num_turns = sum(cast("int", strand["num_turns"]) for strand in strands)
        yield (
            f"session {session_id}: {_count(num_turns, 'turn')} in {_count(len(strands), 'strand')},"
            f" {sampled:,} tokens sampled"
        )
    for strand in strands[:_MAX_STRANDS]:
        yield _strand_line(strand)
    if len(strands) > _MAX_STRANDS:
        yield f"  and {_count(len(strands) - _MAX_STRANDS, 'more strand')}"
    refused = Counter(f"{row['status']} {row['error']}" for row in rows if row["error"] is not None)
    if refused:
        yield "  refused: " + ", ".join(f"{number} x {error}" for error, number in refused.most_common())
    discarded = cast("Mapping[str, int]", metadata["discarded"])
    if discarded["turns"]:
        replaced, lost = _count(discarded["turns"], "turn"), discarded["sampled_tokens"]
        yield f"  replaced by later ones: {replaced}, {lost:,} sampled tokens"
    if strands:
        yield f"  {drift_line(calls.drift(session_id))}"


def _strand_line(strand: Mapping[str, object]) -> str:
    number, kind = f"{strand['strand']}", str(strand["kind"])
    client = "" if strand["client"] is None else f", {strand['client']}"
    continues = "" if strand["continues"] is None else f", goes on with {strand['continues']}"
    turns = _count(cast("int", strand["num_turns"]), "turn")
    return (
        f"  strand {number:>2}  {kind:<10} {turns:>9} {cast('int', strand['num_tokens']):>9,} tokens{client}{continues}"
    )


def drift_line(report: Mapping[str, object]) -> str:
    """The differences between the lines' ids and the template's, by class, and their meaning."""
    lines = cast("list[dict[str, object]]", report["lines"])
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(cast("dict[str, int]", line["counts"]))
    found = [f"{number} x {kind}" for kind, number in sorted(counts.items()) if number]
    num_blind = sum(line["unrenderable"] is not None for line in lines)
    found += [f"{_count(num_blind, 'line')} that cannot be compared"] if num_blind else []
    if not found:
        return "drift: none"
    is_harmless = not num_blind and {kind for kind, number in counts.items() if number} == {_HARMLESS}
    meaning = (
        "the model spelled a reply in other tokens than the template would; harmless, its own tokens are kept"
        if is_harmless
        else "docs/drift.md has what each means"
    )
    return f"drift: {', '.join(found)} ({meaning})"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
