"""`GET /waste`: the fate of sampled tokens, by group and in all. A Starlette endpoint."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import InvalidRequest
from stenograph.core.json_pieces import as_list
from stenograph.core.json_types import Count
from stenograph.core.outcome import TokenFate
from stenograph.core.waste import GroupCounts
from stenograph.http.responses import json_in_pieces
from stenograph.http.route import STORED, TEXT, All, Reach, parameter, route
from stenograph.http.session_routes import SessionRoutes, filter_of
from stenograph.session.selection import SessionFilter, selected
from stenograph.session.session import Session


class SampledTokensByFate(TypedDict):
    """Sampled tokens by what became of them, each once. `wasted`: in turns that failed or were abandoned."""

    trained: Count
    discarded: Count
    infra_failed: Count
    aborted: Count
    untrained: Count
    wasted: Count


class WasteRow(TypedDict):
    """The tokens of a group's sessions; null: of those without a group."""

    group: str | None
    live_sessions: Count
    ended_sessions: Count
    tokens: SampledTokensByFate


class Waste(TypedDict):
    """The tokens that were sampled since the server started, of sessions that ended and of those in memory."""

    live_sessions: Count
    ended_sessions: Count
    tokens: SampledTokensByFate
    groups: Sequence[WasteRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteRoute:
    """The route of one server."""

    sessions: SessionRoutes

    @route(
        "GET /waste",
        "getWaste",
        "Get what became of sampled tokens, by group",
        Waste,
        parameters=(parameter("query", "group", "Only this group.", TEXT),),
        errors=(InvalidRequest, *STORED),
        who=All(merge="stenograph.http.merging:waste", reach=Reach.SERVERS),
    )
    async def get(self, request: Request) -> Response:
        """`GET /waste?group=`."""
        only = filter_of(request, filters=("group",)).group
        live: Counter[str | None] = Counter()
        found: dict[str | None, GroupCounts] = {}
        async for session in selected(self.sessions.manager, SessionFilter(group=only)):
            if isinstance(session, Session):
                group = session.options.stated.group
                live[group] += 1
                found.setdefault(group, GroupCounts()).add(GroupCounts(num_tokens=session.num_tokens_by_fate()))
        for group, counts in self.sessions.metrics.waste.groups.items():
            if only is None or group == only:
                found.setdefault(group, GroupCounts()).add(counts)
        whole = GroupCounts()
        for counts in found.values():
            whole.add(counts)
        body: Waste = {
            "live_sessions": live.total(),
            "ended_sessions": whole.num_ended,
            "tokens": _tokens(whole),
            "groups": as_list(_rows(found, live)),
        }
        return json_in_pieces(self.sessions.share, body)


def _rows(found: Mapping[str | None, GroupCounts], live: Mapping[str | None, int]) -> Iterator[WasteRow]:
    for group, counts in found.items():
        yield {
            "group": group,
            "live_sessions": live.get(group, 0),
            "ended_sessions": counts.num_ended,
            "tokens": _tokens(counts),
        }


def _tokens(counts: GroupCounts) -> SampledTokensByFate:
    return {
        "trained": counts.num_tokens[TokenFate.TRAINED],
        "discarded": counts.num_tokens[TokenFate.DISCARDED],
        "infra_failed": counts.num_tokens[TokenFate.INFRA_FAILED],
        "aborted": counts.num_tokens[TokenFate.ABORTED],
        "untrained": counts.num_tokens[TokenFate.UNTRAINED],
        "wasted": counts.num_wasted,
    }
