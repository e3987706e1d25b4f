"""The drift report of a line of committed turns. Pure; renders the whole line, so it is work for the CPU pool."""

from stenograph.core.chat import Asked
from stenograph.render.drift import DriftReport, find_drift
from stenograph.render.renderer import Renderer
from stenograph.trajectory.turn import Node, line_ids, line_messages


def sampled_spans(leaf: Node) -> list[tuple[int, int]]:
    """Half-open spans, in the ids of the line down to `leaf`, of the tokens that were sampled and are still in it."""
    spans: list[tuple[int, int]] = []
    end = 0
    for node in leaf.line():
        turn = node.turn
        if turn.num_trimmed:
            end -= turn.num_trimmed
            start, _ = spans.pop()
            spans.append((start, end))
        start = end + len(turn.new_prompt_ids)
        end = start + len(turn.sampled.ids)
        spans.append((start, end))
    return spans


def line_drift(leaf: Node, renderer: Renderer) -> DriftReport:
    """Compare the ids of the line down to `leaf` with a new render of its messages, if it has them."""
    if any(node.turn.asked is Asked.COMPLETION for node in leaf.line()):
        return DriftReport(unrenderable="There is a completion in this line: it has no messages to compare.")
    context = leaf.turn.context
    return find_drift(
        renderer,
        ids=line_ids(leaf),
        sampled_spans=sampled_spans(leaf),
        messages=line_messages(leaf),
        tools=context.tools,
        kwargs=context.arguments,
    )
