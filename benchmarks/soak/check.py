"""At the end of a soak's session: read all that it shows, and compare it with its model and with what the engine saw.

Reads the records, the accumulated ids, the samples and the drift; knows their shapes, and none of the moves.
"""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from benchmarks.kit.client import LoadClient, RequestFailed
from benchmarks.soak.http import told
from benchmarks.soak.model import Said, SessionModel, Shown, differences
from standins.ordered_engine import Generation

FORBIDDEN_DRIFT = ("special_token_count", "special_token_type", "non_assistant_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """The findings of a look at a session."""

    differences: tuple[str, ...]
    num_ids: int
    num_generations: int


class _SoakMeta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, None]]


class _SoakChoice(msgspec.Struct):
    meta_info: _SoakMeta


class _Response(msgspec.Struct):
    choices: list[_SoakChoice]


class _EngineRequest(msgspec.Struct):
    num_kept_ids: int
    input_ids: list[int]


class _Record(msgspec.Struct):
    request_id: str
    status: str
    request: _EngineRequest
    response: _Response


class _Node(msgspec.Struct):
    id: int
    parent: int | None
    status: str
    completion_span: tuple[int, int]
    response_id: str


class _Leaf(msgspec.Struct):
    path_node_ids: list[int]


class _Tree(msgspec.Struct):
    nodes: list[_Node]
    leaves: list[_Leaf]


class _SoakMetadata(msgspec.Struct):
    accumulated_token_ids: list[int]
    tree: _Tree | None = None


class _View(msgspec.Struct):
    records: list[_Record]
    metadata: _SoakMetadata


class _SampleMetadata(msgspec.Struct):
    leaf: _Leaf


class _Sample(msgspec.Struct):
    tokens: list[int]
    loss_mask: list[int]
    response_length: int
    metadata: _SampleMetadata


class _Samples(msgspec.Struct):
    samples: list[_Sample]


class _DriftLine(msgspec.Struct):
    leaf: int
    counts: dict[str, int]


class _Drift(msgspec.Struct):
    lines: list[_DriftLine]


class _Generations(msgspec.Struct):
    generations: list[Generation]


async def check(
    server: LoadClient, engine: LoadClient, session_id: str, model: SessionModel, said: Said, *, replays: bool
) -> Inspected:
    """Look at a session in which at most what was hung up on still runs.

    One that `replays` may have no samples: only some turns have a payload.

    Raises RequestFailed where one of its routes does not answer.
    """
    path = f"/sessions/{session_id}"
    view, samples = await _settled(server, path, replays=replays)
    drift = msgspec.convert(await told(server, "GET", f"{path}/drift"), _Drift)
    seen = msgspec.convert(
        await told(engine, "POST", "/soak/session", {"session": session_id}), _Generations
    ).generations
    shown = {turn.rid: turn for turn in _of_records(view)}
    tree = view.metadata.tree
    problems = list(_unlike_accumulated(view))
    if tree is not None:
        in_samples = {turn.rid: turn for turn in _of_samples(tree, samples or [])}
        problems += _unlike(shown, in_samples)
        shown = in_samples | shown
        shown = {turn.rid: turn for turn in _without_ids(tree)} | shown
    problems += differences(model, list(shown.values()), seen, said)
    if samples is not None:
        problems += _untrained(samples, shown, tree)
    problems += [
        f"drift of the line to {line.leaf}: {line.counts[kind]} {kind}"
        for line in drift.lines
        for kind in FORBIDDEN_DRIFT
        if line.counts.get(kind)
    ]
    num_ids = sum(len(sample.tokens) for sample in samples or ()) + len(view.metadata.accumulated_token_ids)
    return Inspected(differences=tuple(problems), num_ids=num_ids, num_generations=len(seen))


async def _settled(server: LoadClient, path: str, *, replays: bool) -> tuple[_View, list[_Sample] | None]:
    """The session and its samples, of one moment: a turn that was hung up on may still have been about to be kept."""
    view = await told(server, "GET", f"{path}?records=delta")
    while True:
        samples = await _samples(server, path, replays=replays)
        again = await told(server, "GET", f"{path}?records=delta")
        if again == view:
            return msgspec.convert(view, _View), samples
        view = again


async def _samples(server: LoadClient, path: str, *, replays: bool) -> list[_Sample] | None:
    """The samples; None where a payload that not all turns have keeps them from being made."""
    try:
        return msgspec.convert(await told(server, "POST", f"{path}/samples", {"format": "json"}), _Samples).samples
    except RequestFailed as failure:
        if replays and failure.kind == "422 samples_inconsistent":
            return None
        raise


def _of_records(view: _View) -> Iterator[Shown]:
    """The turns of the latest line, joined from what each record adds."""
    line = array("i")
    parent: str | None = None
    for record in view.records:
        line = line[: record.request.num_kept_ids] + array("i", record.request.input_ids)
        start = len(line)
        line.extend(id_ for _, id_, _ in record.response.choices[0].meta_info.output_token_logprobs)
        yield Shown(
            rid=record.request_id, parent=parent, status=record.status, start=start, end=len(line), line=line[:]
        )
        parent = record.request_id


def _unlike_accumulated(view: _View) -> Iterator[str]:
    last = next(reversed(list(_of_records(view))), None)
    if (array("i") if last is None else last.line) != array("i", view.metadata.accumulated_token_ids):
        yield "the accumulated ids are not those of the records"


def _of_samples(tree: _Tree, samples: list[_Sample]) -> Iterator[Shown]:
    """The turns of a tree that are in a sample."""
    nodes = {node.id: node for node in tree.nodes}
    for sample in samples:
        tokens = array("i", sample.tokens)
        for node in (nodes[id_] for id_ in sample.metadata.leaf.path_node_ids):
            yield _shown(node, nodes, tokens[: node.completion_span[1]])


def _without_ids(tree: _Tree) -> Iterator[Shown]:
    """All turns, without their ids: no sample has those that a later sibling supersedes."""
    nodes = {node.id: node for node in tree.nodes}
    for node in tree.nodes:
        yield _shown(node, nodes, None)


def _shown(node: _Node, nodes: Mapping[int, _Node], line: "array[int] | None") -> Shown:
    start, end = node.completion_span
    parent = None if node.parent is None else nodes[node.parent].response_id
    return Shown(rid=node.response_id, parent=parent, status=node.status, start=start, end=end, line=line)


def _unlike(records: Mapping[str, Shown], samples: Mapping[str, Shown]) -> Iterator[str]:
    """Where a turn's record says something else than its sample."""
    for rid, turn in records.items():
        other = samples.get(rid)
        if other is not None and other != turn:
            yield f"record and sample of {rid} are not the same"


def _untrained(samples: list[_Sample], shown: Mapping[str, Shown], tree: _Tree | None) -> Iterator[str]:
    """Whether each drawn id that is in a sample is trained once."""
    if tree is None:
        drawn = sum(turn.end - turn.start for turn in shown.values())
    else:
        kept = {id_ for sample in samples for id_ in sample.metadata.leaf.path_node_ids}
        drawn = sum(node.completion_span[1] - node.completion_span[0] for node in tree.nodes if node.id in kept)
    trained = sum(sum(sample.loss_mask) for sample in samples)
    if trained != drawn:
        yield f"{trained} ids are trained, {drawn} were drawn"
