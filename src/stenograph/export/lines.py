"""Selects the lines of a session for its samples, and the sample to train each turn (docs/samples.md). Pure.

Every function takes committed turns oldest first, as `History.nodes` has them, and may run on a worker with a snapshot:
children are derived from parents. Numbers per token are made in samples.py.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, cast

from stenograph.core.errors import SamplesInconsistent
from stenograph.core.json_types import Count
from stenograph.core.kinds import StrandKind
from stenograph.core.loaded import entry
from stenograph.core.outcome import RolloutVerdict
from stenograph.core.types import WeightSpan
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts, leaves
from stenograph.trajectory.turn import Node, TurnStatus, line_ids


class WireSpan(TypedDict):
    """Tokens `[start, end)` were sampled by weights `version`."""

    version: str
    start: Count
    end: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePart:
    """The part of one turn in a line: all of its new prompt ids, then its first `num_sampled` sampled ids.

    Ids at the end are missing where the next turn's opener replaces them, or where a sample was cut.
    """

    node: Node
    num_sampled: int

    @property
    def num_prompt(self) -> int:
        """New prompt ids of the turn, effective ones."""
        turn = self.node.turn
        return len(turn.new_prompt_ids) + sum(len(one.ids) - 1 for one in turn.media)

    @property
    def num_tokens(self) -> int:
        """Ids of the turn in the line."""
        return self.num_prompt + self.num_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLine:
    """The path to `leaf`, or its beginning: `ids` [T] int32 are the effective ones of `parts`, in order. At least one
    part.

    `status` is the leaf's, or TRUNCATED where sampled ids were cut off, or a turn's limit cut it off.
    """

    leaf: Node
    parts: tuple[LinePart, ...]
    ids: "array[int]"
    status: TurnStatus


def spans_json(spans: Sequence[WeightSpan]) -> list[WireSpan]:
    """Spans of tokens by the weights that sampled them, as plain values."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]


def whole_line(leaf: Node, *, max_trim_tokens: int) -> SampleLine:
    """The line down to `leaf`, every id of it accounted for.

    Raises SamplesInconsistent, with the turn and the numbers: a turn trims more than `max_trim_tokens`, or more than
    its parent sampled; or the turns do not add up to the line's ids.
    """
    path = leaf.line()
    parts: list[LinePart] = []
    for index, node in enumerate(path):
        _check_turn(node, max_trim_tokens)
        num_trimmed = path[index + 1].turn.num_trimmed if node is not leaf else 0
        parts.append(LinePart(node=node, num_sampled=len(node.turn.sampled.ids) - num_trimmed))
    line = SampleLine(leaf=leaf, parts=tuple(parts), ids=line_ids(leaf), status=leaf.turn.status)
    _check_ids(line)
    if not leaf.media:
        return line
    return replace(line, ids=cast("array[int]", entry("stenograph.core.media:effective_ids")(line.ids, leaf.media)))


def cut(line: SampleLine, max_seq_len: int) -> SampleLine | None:
    """The longest beginning of `line` within `max_seq_len` ids and with a sampled id at its end; None if there is none.

    So the first turn beyond the limit is cut if its prompt and one sampled id fit, else dropped, and so are the turns
    after it. A line within the limit is given back as it is.
    """
    if len(line.ids) <= max_seq_len:
        return line
    kept: list[LinePart] = []
    room = max_seq_len
    for part in line.parts:
        if part.num_prompt >= room:
            break
        kept.append(replace(part, num_sampled=min(part.num_sampled, room - part.num_prompt)))
        room -= kept[-1].num_tokens
    while kept and not kept[-1].num_sampled:  # its only sampled id was an opener, which the next turn replaced
        kept.pop()
    return _beginning(line, kept, TurnStatus.TRUNCATED) if kept else None


def without_empty_end(line: SampleLine) -> SampleLine:
    """A line without its last turn, if that was aborted before it sampled a token; other lines unchanged."""
    if len(line.parts) < 2 or line.parts[-1].node.turn.sampled.ids:
        return line
    return _beginning(line, line.parts[:-1], line.status)


def _beginning(line: SampleLine, parts: Sequence[LinePart], status: TurnStatus) -> SampleLine:
    ids = line.ids[: sum(part.num_tokens for part in parts)]
    return SampleLine(leaf=line.leaf, parts=tuple(parts), ids=ids, status=status)


def owners(lines: Sequence[SampleLine]) -> dict[int, int]:
    """For each turn in `lines`, by node id, the index of the one line to train it.

    It is the line with most of its sampled ids, the earliest of those. Every copy is a beginning of the sampled ids, so
    every id in a line is trained.
    """
    best: dict[int, tuple[int, int]] = {}
    for index, line in enumerate(lines):
        for part in line.parts:
            if part.node.id not in best or part.num_sampled > best[part.node.id][0]:
                best[part.node.id] = (part.num_sampled, index)
    return {node_id: index for node_id, (_, index) in best.items()}


def leaf_descriptor(leaf: Node) -> dict[str, object]:
    """The origin of a sample: its leaf, the path to it, and the id of its last reply as the client knows it."""
    return {
        "node_id": leaf.id,
        "parent": _parent_id(leaf),
        "path_node_ids": [node.id for node in leaf.line()],
        "response_id": leaf.turn.reply_id,
    }


def tree_metadata(nodes: Sequence[Node]) -> dict[str, object]:
    """A session's shape, as plain values: every node and every leaf, oldest commit first.

    `completion_span` is where a node's sampled ids are, `[start, end)` of the `num_tokens` ids down to it.
    """
    return {
        "nodes": [_node_row(node) for node in nodes],
        "leaves": [{"node_id": leaf.id, "path_node_ids": [node.id for node in leaf.line()]} for leaf in leaves(nodes)],
    }


def _node_row(node: Node) -> dict[str, object]:
    turn = node.turn
    return {
        "id": node.id,
        "parent": _parent_id(node),
        "seq": node.id,
        "status": turn.status,
        "truncated": turn.status is TurnStatus.TRUNCATED,
        "committed_at": turn.committed_at,
        "completion_span": [node.num_tokens - len(turn.sampled.ids), node.num_tokens],
        "num_tokens": node.num_tokens,
        "response_id": turn.reply_id,
    }


def _parent_id(node: Node) -> int | None:
    return None if node.parent is None else node.parent.id


def _check_turn(node: Node, max_trim_tokens: int) -> None:
    turn = node.turn
    num_sampled = len(node.parent.turn.sampled.ids) if node.parent is not None else 0
    if not 0 <= turn.num_trimmed <= num_sampled:
        raise inconsistent(node, f"it trims {turn.num_trimmed} tokens, but the turn before it sampled {num_sampled}")
    if turn.num_trimmed > max_trim_tokens:
        raise inconsistent(
            node, f"it trims {turn.num_trimmed} tokens of the turn before it, but max_trim_tokens is {max_trim_tokens}"
        )


def _check_ids(line: SampleLine) -> None:
    at = 0
    for part in line.parts:
        turn = part.node.turn
        ids = turn.new_prompt_ids + turn.sampled.ids[: part.num_sampled]
        if line.ids[at : at + len(ids)] != ids:
            raise inconsistent(
                part.node, f"its {len(ids)} tokens are not those of the line to node {line.leaf.id} at token {at}"
            )
        at += len(ids)
    if not at == len(line.ids) == line.leaf.num_tokens:
        raise inconsistent(
            line.leaf,
            f"the turns of its line have {at} tokens, the line {len(line.ids)}, and {line.leaf.num_tokens} are counted",
        )


def inconsistent(node: Node, what: str) -> SamplesInconsistent:
    """The error to raise where a turn does not fit its line; `what` is about "it", the turn."""
    return SamplesInconsistent(f"Turn {node.depth - 1} of its line (node {node.id}): {what}.")


class StrandRow(TypedDict):
    """A strand in a session's metadata. `leaf` is its latest turn, None if its turns have all been replaced."""

    strand: Count
    kind: StrandKind
    rule: str | None
    client: str | None
    agent_id: str
    chapter: Count
    continues: Count | None
    num_turns: Count
    num_tokens: Count
    leaf: Count | None


class LeftOut(TypedDict):
    """Strands that became no samples, and their sampled tokens."""

    strands: Count
    sampled_tokens: Count


def strand_row(strand: StrandFacts) -> StrandRow:
    """A strand as plain values."""
    return {
        "strand": strand.number,
        "kind": strand.kind,
        "rule": strand.rule,
        "client": strand.client,
        "agent_id": strand.agent_id,
        "chapter": strand.chapter,
        "continues": strand.continues,
        "num_turns": len(strand.nodes),
        "num_tokens": strand.num_tokens,
        "leaf": None if strand.latest is None else strand.latest.id,
    }


def left_out(facts: SessionFacts, lines: Sequence[SampleLine], failed: Sequence[SampleLine] = ()) -> dict[str, LeftOut]:
    """By kind, the strands of these lines, and the sampled tokens in them, each counted once; those of `failed` lines
    together, as `infra_failed`."""
    told: dict[str, LeftOut] = {}
    for strand, num_tokens in _counted(facts, lines):
        _add(told, strand.kind, num_tokens)
    for _, num_tokens in _counted(facts, failed):
        _add(told, RolloutVerdict.INFRA_FAILED, num_tokens)
    return told


def _counted(facts: SessionFacts, lines: Sequence[SampleLine]) -> Iterator[tuple[StrandFacts, int]]:
    """The strands of these lines, with the sampled tokens in them."""
    by_node, found = facts.by_node(), dict[int, set[int]]()
    for line in lines:
        found.setdefault(by_node[line.leaf.id].number, set()).update(part.node.id for part in line.parts)
    for number, ids in found.items():
        nodes = facts.strands[number].nodes
        yield facts.strands[number], sum(len(node.turn.sampled.ids) for node in nodes if node.id in ids)


def _add(told: dict[str, LeftOut], name: str, num_tokens: int) -> None:
    row = told.setdefault(name, {"strands": 0, "sampled_tokens": 0})
    row["strands"] += 1
    row["sampled_tokens"] += num_tokens
