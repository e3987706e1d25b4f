"""The findings of a session: the reasons for unexpected samples, in plain sentences, the worst first. Pure.

Reads the session's own facts (turns, strands, drift, ledger, outcome) and judges nothing beyond them. It knows no
sample and no route; work for the CPU pool.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from stenograph.core.chat import Asked
from stenograph.core.drift import FORBIDDEN, Drift, DriftReport
from stenograph.core.json_types import Count, Hex32
from stenograph.core.kinds import TRAINED_KINDS
from stenograph.core.messages import Role
from stenograph.core.outcome import RolloutVerdict
from stenograph.export.ledger_rows import LedgerEntry, ledger_rows
from stenograph.trajectory.commits import LedgerRow
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts
from stenograph.trajectory.turn import Node, TurnStatus

MAX_LISTED = 32
"""Number of turns, and of requests, listed in a finding."""

_MAX_SEEN_CHARS = 80

_CALL_MARKS = ("<tool_call", "<|tool_call", "[TOOL_CALLS]", "<function=", "<function_call", "<|python_tag|>", "<｜tool")
"""The beginnings of calls in many formats; a reply with one, and no call, may have been read by a wrong one."""


class Gravity(enum.StrEnum):
    """The weight of a finding for the samples."""

    WRONG = "wrong"
    """Something is trained, and likely was not meant to be."""
    LOST = "lost"
    """Something sampled or asked for is in no sample."""
    NOTE = "note"
    """As it should be, and good to know."""


class FindingKind(enum.StrEnum):
    """The kinds of findings, in the order in which they are told."""

    NO_TURNS = "no_turns"
    INFRA_FAILED = "infra_failed"
    FORBIDDEN_DRIFT = "forbidden_drift"
    UNRENDERABLE = "unrenderable"
    FOREIGN_REPLY = "foreign_reply"
    UNREAD_CALL = "unread_call"
    PARSE_FAULT = "parse_fault"
    MIXED_VERSIONS = "mixed_versions"
    REFUSED = "refused"
    LOST_CLIENT = "lost_client"
    DISCARDED = "discarded"
    CUT_TURN = "cut_turn"
    ABORTED_TURN = "aborted_turn"
    SIDE_REQUESTS = "side_requests"
    NO_OUTCOME = "no_outcome"
    NO_REWARD = "no_reward"
    CHAPTERS = "chapters"
    FORCED_TOKENS = "forced_tokens"
    REWRITES = "rewrites"
    OTHER_SPELLING = "other_spelling"


class SampleFinding(TypedDict):
    """One finding. `told` is a sentence or two for a person; `see` are addresses below the session's with more, and
    `link` is the place in this server's console that shows it.

    `turns` are node ids and `requests` numbers in the ledger: the first 32 of those that it is about, `count` in all.
    """

    kind: FindingKind
    gravity: Gravity
    told: str
    strand: Count | None
    turns: Sequence[Count]
    requests: Sequence[Count]
    count: Count
    see: Sequence[str]
    link: str


class SessionFindings(TypedDict):
    """The findings of a session, the worst first. None: nothing is out of the ordinary."""

    session_id: Hex32
    findings: Sequence[SampleFinding]
    num_turns: Count
    num_requests: Count
    sampled_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A session as it is now. `reports` has the drift of each line by its last node's id; of the requests
    in the ledger there are the first 10,000."""

    facts: SessionFacts
    reports: Mapping[int, DriftReport] = field(default_factory=dict[int, DriftReport])
    requests: Sequence[LedgerEntry] = ()


def session_findings(
    facts: SessionFacts,
    reports: Mapping[int, DriftReport],
    rows: Sequence[LedgerRow],
    num_requests: int,
) -> SessionFindings:
    """A session's findings for its reader. `reports` has the drift of each line, `rows` the requests in its ledger."""
    evidence = Evidence(facts=facts, reports=reports, requests=ledger_rows(rows, facts))
    return {
        "session_id": facts.session_id,
        "findings": findings(evidence),
        "num_turns": len(facts.nodes),
        "num_requests": num_requests,
        "sampled_tokens": _num_sampled(facts.nodes),
    }


def findings(evidence: Evidence) -> list[SampleFinding]:
    """All findings, in the order of `FindingKind`."""
    order = {kind: at for at, kind in enumerate(FindingKind)}
    found = [finding for look in _LOOKS for finding in look(evidence)]
    for finding in found:
        finding["link"] = f"/console#/session/{evidence.facts.session_id}?{finding['link']}"
    return sorted(found, key=lambda finding: order[finding["kind"]])


def _finding(
    kind: FindingKind,
    gravity: Gravity,
    told: str,
    *,
    strand: StrandFacts | None = None,
    nodes: Sequence[Node] = (),
    rows: Sequence[LedgerEntry] = (),
    count: int | None = None,
    see: Sequence[str] = (),
    place: str | None = None,
) -> SampleFinding:
    """A finding. `place` is where the console shows it, by default its first turn or request."""
    if place is None:
        place = "tab=facts"
        if nodes:
            place = f"turn={nodes[0].id}"
        elif rows:
            place = f"tab=ledger&request={rows[0]['number']}"
    return {
        "kind": kind,
        "gravity": gravity,
        "told": told,
        "strand": None if strand is None else strand.number,
        "turns": [node.id for node in nodes[:MAX_LISTED]],
        "requests": [row["number"] for row in rows[:MAX_LISTED]],
        "count": count or len(nodes) or len(rows) or 1,
        "see": [*see, *([f"?strand={strand.number}"] if strand is not None and nodes else [])],
        "link": place,
    }


def _of_session(evidence: Evidence) -> Iterator[SampleFinding]:
    """The session as a whole: its turns, its outcome, its reward."""
    facts = evidence.facts
    if not facts.nodes:
        told = "No turn was committed, so there is nothing to train on."
        told += " No request came." if not evidence.requests else ""
        yield _finding(FindingKind.NO_TURNS, Gravity.LOST, told, see=("/ledger",), place="tab=ledger")
    outcome = facts.outcome
    if outcome is None:
        told = "Nobody has said how the rollout ended: its samples have no reward. PUT …/outcome says it."
        yield _finding(FindingKind.NO_OUTCOME, Gravity.NOTE, told, see=("/outcome",))
    elif outcome.verdict is RolloutVerdict.INFRA_FAILED:
        detail = "" if outcome.detail is None else f" Its detail: {_seen(outcome.detail)}."
        told = f"The rollout failed by infrastructure: its samples are left out unless include_failed is asked.{detail}"
        yield _finding(FindingKind.INFRA_FAILED, Gravity.LOST, told, see=("/outcome",))
    elif outcome.reward is None:
        told = f"The outcome is {outcome.verdict}, but it has no reward."
        yield _finding(FindingKind.NO_REWARD, Gravity.NOTE, told, see=("/outcome",))
    gone = facts.discarded
    if gone.num_turns:
        told = f"{_num(gone.num_turns, 'turn')} with {_num(gone.num_tokens, 'sampled token')} had been committed and"
        told += " were replaced, because a client asked again from an earlier message. They are in no sample."
        told += ' With {"history": "tree"} they would be.'
        yield _finding(
            FindingKind.DISCARDED, Gravity.LOST, told, count=gone.num_turns, see=("/ledger",), place="tab=ledger"
        )


def _of_requests(evidence: Evidence) -> Iterator[SampleFinding]:
    """The requests without a turn."""
    refused: dict[tuple[str, int], list[LedgerEntry]] = {}
    for row in evidence.requests:
        if row["error"] is not None:
            refused.setdefault((row["error"], row["status"] or 0), []).append(row)
    for (error, status), rows in refused.items():
        told = f"{_num(len(rows), 'request')} ended with {error}{f' (status {status})' if status else ''}"
        told += f", the first as request {rows[0]['number']}. What was sampled for them is in no sample."
        yield _finding(FindingKind.REFUSED, Gravity.LOST, told, rows=rows, see=("/ledger",))
    left = [row for row in evidence.requests if row["ended"] is not None and row["status"] is None]
    if left:
        told = f"The client of {_num(len(left), 'request')} hung up before its answer: what had been sampled was ended"
        told += " at the engine, unless the turn was already on its way to being kept."
        yield _finding(FindingKind.LOST_CLIENT, Gravity.LOST, told, rows=left, see=("/ledger",))


def _of_drift(evidence: Evidence) -> Iterator[SampleFinding]:
    """Lines written otherwise by the template."""
    by_node = evidence.facts.by_node()
    for leaf_id, report in evidence.reports.items():
        strand = by_node[leaf_id]
        if report.unrenderable is not None:
            if all(node.turn.asked is Asked.CHAT for node in strand.nodes):
                told = f"The chat template cannot show this line, so it was not compared: {_seen(report.unrenderable)}"
                place = f"tab=drift&leaf={leaf_id}"
                yield _finding(
                    FindingKind.UNRENDERABLE, Gravity.NOTE, told, strand=strand, see=("/drift",), place=place
                )
            continue
        forbidden = [drift for drift in report.drifts if drift.type in FORBIDDEN]
        tolerated = len(report.drifts) - len(forbidden)
        if forbidden:
            first = forbidden[0]
            told = (
                f"The ids differ from the chat template in {_num(len(forbidden), 'place')} that no reply explains:"
                f" {first.type} at token {first.start}, where the template writes {_seen(first.expected_text)} and"
                f" the line has {_seen(first.actual_text)}. Is the template append-only? `stenograph verify` says so."
            )
            yield _finding(
                FindingKind.FORBIDDEN_DRIFT,
                Gravity.WRONG,
                told,
                strand=strand,
                count=len(forbidden),
                see=("/drift",),
                place=_drift_place(leaf_id, forbidden[0]),
            )
        if tolerated:
            told = (
                f"The model spelled {_num(tolerated, 'place')} with other tokens than the tokenizer would. The sample"
                " has what it sampled; a trainer that tokenizes the text again would not."
            )
            first = next(drift for drift in report.drifts if drift.type not in FORBIDDEN)
            yield _finding(
                FindingKind.OTHER_SPELLING,
                Gravity.NOTE,
                told,
                strand=strand,
                count=tolerated,
                see=("/drift",),
                place=_drift_place(leaf_id, first),
            )


def _drift_place(leaf_id: int, drift: Drift) -> str:
    return f"tab=drift&leaf={leaf_id}&token={drift.start}"


def _of_strands(evidence: Evidence) -> Iterator[SampleFinding]:
    """Strands of no work, continuations of another strand, and strands sampled by several weights."""
    side = [strand for strand in evidence.facts.strands if strand.nodes and strand.kind not in TRAINED_KINDS]
    if side:
        kinds = ", ".join(f"{num} {kind}" for kind, num in Counter(str(strand.kind) for strand in side).items())
        nodes = [node for strand in side for node in strand.nodes]
        told = (
            f"{_num(len(side), 'strand')} of side requests ({kinds}) with {_num(_num_sampled(nodes), 'sampled token')}"
            " are in no sample unless include_side or kinds asks for them."
        )
        see = ("/samples",)
        yield _finding(FindingKind.SIDE_REQUESTS, Gravity.NOTE, told, nodes=nodes, count=len(side), see=see)
    later = [strand for strand in evidence.facts.strands if strand.continues is not None and strand.nodes]
    if later:
        told = (
            f"The work went on in {_num(len(later), 'strand')} that began anew, after a compaction or another reply in"
            " the place of one: each is a sample of its own, and what it shows of earlier replies is prompt."
        )
        nodes = [strand.nodes[0] for strand in later]
        yield _finding(FindingKind.CHAPTERS, Gravity.NOTE, told, nodes=nodes)
    for strand in evidence.facts.strands:
        versions = list(dict.fromkeys(span.version for node in strand.nodes for span in node.turn.sampled.weights))
        if len(versions) > 1:
            names = ", ".join(_seen(version) for version in versions[:4]) + (", …" if len(versions) > 4 else "")
            told = (
                f"{len(versions)} versions of the weights sampled this strand ({names}): the older ones are stale for a"
                " trainer that takes one policy for a sample. weight_spans says which token is whose."
            )
            nodes = [node for node in strand.nodes if node.turn.sampled.weights]
            place = f"turn={nodes[0].id}&colour=version"
            yield _finding(FindingKind.MIXED_VERSIONS, Gravity.WRONG, told, strand=strand, nodes=nodes, place=place)


def _of_turns(evidence: Evidence) -> Iterator[SampleFinding]:
    """Findings about the turns themselves, each reported once for a strand."""
    for strand in evidence.facts.strands:
        for kind, gravity, is_so, tell in _TURN_LOOKS:
            nodes = [node for node in strand.nodes if is_so(strand, node)]
            if nodes:
                place = f"turn={nodes[0].id}{_VIEW_OF.get(kind, '')}"
                yield _finding(kind, gravity, tell(nodes), strand=strand, nodes=nodes, place=place)


_VIEW_OF = {
    FindingKind.CUT_TURN: "&colour=mask",
    FindingKind.FORCED_TOKENS: "&colour=source",
    FindingKind.FOREIGN_REPLY: "&colour=source",
    FindingKind.REWRITES: "&tab=rewrites",
}
"""Views of the console beside a turn, where one explains the finding."""

_Look = Callable[[StrandFacts, Node], bool]
_Tell = Callable[[Sequence[Node]], str]


def _has_foreign_reply(strand: StrandFacts, node: Node) -> bool:
    if node.parent is None and strand.continues is not None:
        return False  # it shows the replies of the strand that it goes on with
    return any(message.role is Role.ASSISTANT for message in node.turn.messages)


def _tell_foreign_reply(nodes: Sequence[Node]) -> str:
    told = (
        f"{_num(len(nodes), 'turn')} came with an assistant's message that this line did not sample: the client changed"
    )
    return told + " a reply, or brought one from elsewhere. Its tokens are the template's, and have no loss."


def _has_unread_call(strand: StrandFacts, node: Node) -> bool:
    reply = node.turn.reply
    if not node.turn.context.tools or reply.message.tool_calls or reply.faults:
        return False
    return any(mark in (reply.message.content or "") for mark in _CALL_MARKS)


def _tell_unread_call(nodes: Sequence[Node]) -> str:
    text = nodes[0].turn.reply.message.content or ""
    at = min(text.index(mark) for mark in _CALL_MARKS if mark in text)
    told = (
        f"{_num(len(nodes), 'reply', 'replies')} had text that begins like a call ({_seen(text[at : at + 60])}), but no"
    )
    return told + " call was read from it: the agent saw text. Is --family that of the model?"


def _tell_parse_fault(nodes: Sequence[Node]) -> str:
    faults = [fault for node in nodes for fault in node.turn.reply.faults]
    told = f"{_num(len(nodes), 'reply', 'replies')} could not be read as the model's format has it:"
    return told + f" {faults[0].problem}, first in {_seen(faults[0].seen)}. The agent got this part as text."


def _tell_cut_turn(nodes: Sequence[Node]) -> str:
    return (
        f"{_num(len(nodes), 'reply', 'replies')} ended at a token limit, the first after"
        f" {_num(len(nodes[0].turn.sampled.ids), 'token')}. What was sampled is trained, with status truncated."
    )


def _tell_aborted(nodes: Sequence[Node]) -> str:
    return (
        f"The engine ended {_num(len(nodes), 'reply', 'replies')} early (abort); what was sampled until then is kept."
    )


def _num_forced(node: Node) -> int:
    return 0 if node.turn.sampled.forced is None else node.turn.sampled.forced.count(1)


def _tell_forced_tokens(nodes: Sequence[Node]) -> str:
    forced, sampled = sum(map(_num_forced, nodes)), _num_sampled(nodes)
    return (
        f"{forced} of {_num(sampled, 'sampled token')} were forced by a grammar, which allowed no other: they say"
        " nothing of what the policy prefers. Each turn's row in a sample has them as `forced`."
    )


def _tell_rewrites(nodes: Sequence[Node]) -> str:
    rules = Counter(one.rule for node in nodes for one in node.turn.rewrites)
    return (
        f"{_num(len(nodes), 'turn')} saw the client's messages changed by a rule:"
        f" {', '.join(f'{rule} ({num})' for rule, num in rules.most_common())}. The records have both texts."
    )


_TURN_LOOKS: Sequence[tuple[FindingKind, Gravity, _Look, _Tell]] = (
    (FindingKind.FOREIGN_REPLY, Gravity.WRONG, _has_foreign_reply, _tell_foreign_reply),
    (FindingKind.UNREAD_CALL, Gravity.WRONG, _has_unread_call, _tell_unread_call),
    (FindingKind.PARSE_FAULT, Gravity.WRONG, lambda _, node: bool(node.turn.reply.faults), _tell_parse_fault),
    (FindingKind.CUT_TURN, Gravity.NOTE, lambda _, node: node.turn.status is TurnStatus.TRUNCATED, _tell_cut_turn),
    (
        FindingKind.ABORTED_TURN,
        Gravity.LOST,
        lambda _, node: node.turn.status is TurnStatus.ABORTED,
        _tell_aborted,
    ),
    (FindingKind.FORCED_TOKENS, Gravity.NOTE, lambda _, node: _num_forced(node) > 0, _tell_forced_tokens),
    (FindingKind.REWRITES, Gravity.NOTE, lambda _, node: bool(node.turn.rewrites), _tell_rewrites),
)
"""For each kind of turn: how grave it is, the test for it, and the sentence for a strand's turns of this kind."""

_LOOKS: Sequence[Callable[[Evidence], Iterator[SampleFinding]]] = (
    _of_session,
    _of_requests,
    _of_drift,
    _of_strands,
    _of_turns,
)


def _num_sampled(nodes: Sequence[Node]) -> int:
    return sum(len(node.turn.sampled.ids) for node in nodes)


def _num(num: int, one: str, many: str | None = None) -> str:
    """A number of things in words."""
    return f"{num} {one if num == 1 else many or one + 's'}"


def _seen(text: str) -> str:
    """A text of a client's or a model's, quoted and cut: it is not ours to trust."""
    return repr(text if len(text) <= _MAX_SEEN_CHARS else text[: _MAX_SEEN_CHARS - 1] + "…")
