"""Holds a request against the limits of its session, in the step of beginning its turns. Pure.

Running turns count as if they were committed, but for their tokens; a failed one gives its place back. On a session
with strands `max_turns` counts the work: the turns of strands of kind main or unknown, and of new strands to which no
rule gives another kind. So it holds before anybody knows the main strand.
"""

from stenograph.core.errors import BudgetSpent, Limit
from stenograph.core.kinds import WORK_KINDS, HistoryKind, StrandKind
from stenograph.session.session import Session
from stenograph.session.turn import RequestRun


def spent_budget(session: Session, run: RequestRun) -> BudgetSpent | None:
    """The budget of the session that leaves no place for a request about to begin; None if there is none.

    Notes on it whether its turns are of the work.
    """
    options, strands = session.options, session.strands
    budgets, num_new = options.stated, len(run.turns)
    max_nodes = options.max_nodes if options.history is HistoryKind.TREE else None
    runs = [task.run for task in session.running if task.run.may_yet_commit and not task.task.done()]
    num_running = sum(len(one.turns) for one in runs)
    num_turns = strands.num_turns + num_running
    num_requests = num_turns + strands.discarded.num_turns
    if budgets.max_requests is not None and num_requests + num_new > budgets.max_requests:
        return _spent(Limit.SESSION_REQUESTS, num_requests, budgets.max_requests, "requests (max_requests)")
    if max_nodes is not None and num_turns + num_new > max_nodes:
        return _spent(Limit.NODES, num_turns, max_nodes, "nodes (--max-nodes)")
    if budgets.max_turns is not None:
        if options.history is HistoryKind.STRANDS:
            num_kept, run.is_work = _work(session, run)
            num_turns = num_kept + sum(len(one.turns) for one in runs if one.is_work)
        if run.is_work and num_turns + num_new > budgets.max_turns:
            return _spent(Limit.SESSION_TURNS, num_turns, budgets.max_turns, "turns (max_turns)")
    if budgets.max_total_tokens is not None and strands.num_tokens >= budgets.max_total_tokens:
        return _spent(Limit.SESSION_TOKENS, strands.num_tokens, budgets.max_total_tokens, "tokens (max_total_tokens)")
    return None


def _work(session: Session, run: RequestRun) -> tuple[int, bool]:
    """The number of kept turns of the work once this request is there, and whether its own are."""
    strands, first = session.strands, run.turn.builder
    kinds = strands.kinds(beside_tools=bool(first.context.tools))
    num = 0
    for strand, kind in zip(strands.kept, kinds, strict=True):
        num += len(strand.history.nodes) if kind in WORK_KINDS else 0
    number = run.leases.taken[0].number if run.leases.taken else None
    if number is not None:
        return num, kinds[number] in WORK_KINDS
    return num, run.leases.label.kind in (None, StrandKind.MAIN)


def _spent(limit: Limit, num: int, most: int, what: str) -> BudgetSpent:
    return BudgetSpent(limit, f"This session has had {num} of its {most} {what}, and takes no more.")
