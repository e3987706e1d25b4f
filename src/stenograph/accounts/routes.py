"""The routes of accounts: `GET /accounts`, and why each token of a group has its fate."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from stenograph.accounts.book import AccountBook, SessionFates, num_tokens
from stenograph.accounts.claims import ClaimRoutes
from stenograph.accounts.merging import MAX_ROWS
from stenograph.core.errors import InvalidRequest
from stenograph.core.json_pieces import as_list
from stenograph.core.json_types import Count, Hex32
from stenograph.core.outcome import TokenFate
from stenograph.http.late_routes import Late
from stenograph.http.query import check_query
from stenograph.http.responses import json_in_pieces
from stenograph.http.route import STORED, TEXT, All, Reach, parameter, route, tag_seen_by
from stenograph.http.session_routes import SessionRoutes
from stenograph.parts import AccountSettings, settings_of

BY = ("group", "session", "step", "cause", "tenant")
_AT_ONCE = 1000
"""Accounts of sessions added up in one event-loop iteration."""
Key = str | int | None


class AccountRow(TypedDict):
    """Sampled tokens by fate, each once, and their cost. `key` is a group, a session, a step of the trainer, a
    cause or a tenant; null: of none, or of ended sessions."""

    key: str | int | None
    sampled: Count
    tokens: Mapping[TokenFate, Count]
    cost: float | None


class Accounts(TypedDict):
    """All tokens sampled for sessions. `left_out` rows have fewer tokens than the others."""

    by: str
    live_sessions: Count
    ended_sessions: Count
    whole: AccountRow
    rows: Sequence[AccountRow]
    left_out: Count


class WhyRow(TypedDict):
    """Tokens of one fate by one cause. `session` null: of ended sessions. `node` null: they are in no turn of the
    session."""

    session: Hex32 | None
    node: Count | None
    step: int | None
    fate: TokenFate
    cause: str
    tokens: Count


class GroupWhy(TypedDict):
    """The fate of each sampled token of a group, and its cause."""

    group: str
    rows: Sequence[WhyRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRoutes:
    """The routes of one server's accounts. `price` is for a million sampled tokens."""

    sessions: SessionRoutes
    book: AccountBook
    price: float | None

    @route(
        "GET /accounts",
        "getAccounts",
        "Get the fate of all sampled tokens, and their cost",
        Accounts,
        parameters=(
            parameter("query", "by", "What the rows are of.", {"type": "string", "enum": list(BY)}),
            parameter("query", "group", "Only this group.", TEXT),
        ),
        errors=(InvalidRequest, *STORED),
        who=All(merge="stenograph.accounts.merging:accounts", reach=Reach.NOBODY),
    )
    async def accounts(self, request: Request) -> Response:
        """`GET /accounts?by=&group=`."""
        check_query(request, "by", "group")
        by, group = request.query_params.get("by", BY[0]), request.query_params.get("group")
        if by not in BY:
            raise InvalidRequest(f"by is one of {', '.join(BY)}, got {by[:20]!r}.", param="/by")
        found = defaultdict[Key, Counter[TokenFate]](Counter)
        read = await self.book.read(group, tag=tag_seen_by(request.scope))
        async for one in _in_turn([*read.live, *read.ended]):
            _add(found, by, one)
        whole = Counter[TokenFate]()
        for counts in found.values():
            whole.update(counts)
        shown = sorted(found.items(), key=lambda pair: -pair[1].total())[:MAX_ROWS]
        body: Accounts = {
            "by": by,
            "live_sessions": len(read.live),
            "ended_sessions": read.num_ended,
            "whole": self._row(None, whole),
            "rows": as_list(self._row(key, counts) for key, counts in shown),
            "left_out": len(found) - len(shown),
        }
        return json_in_pieces(self.sessions.share, body)

    @route(
        "GET /accounts/why",
        "getGroupWhy",
        "Get the fate of each sampled token of a group, and its cause",
        GroupWhy,
        parameters=(parameter("query", "group", "The group.", TEXT),),
        errors=(InvalidRequest, *STORED),
        who=All(merge="stenograph.accounts.merging:why", reach=Reach.NOBODY),
    )
    async def why(self, request: Request) -> Response:
        """`GET /accounts/why?group=`."""
        check_query(request, "group")
        group = request.query_params.get("group")
        if group is None:
            raise InvalidRequest("Say which group: give group in the query.", param="/group")
        rows: list[WhyRow] = []
        read = await self.book.read(group, tag=tag_seen_by(request.scope), by_turn=True)
        async for one in _in_turn([*read.live, *read.ended]):
            rows += _why(one)
        body: GroupWhy = {"group": group, "rows": rows}
        return json_in_pieces(self.sessions.share, body)

    def _row(self, key: Key, counts: Counter[TokenFate]) -> AccountRow:
        sampled = counts.total()
        return {
            "key": key,
            "sampled": sampled,
            "tokens": {fate: counts[fate] for fate in TokenFate},
            "cost": None if self.price is None else sampled * self.price / 1e6,
        }


async def _in_turn(all_fates: Sequence[SessionFates]) -> AsyncGenerator[SessionFates, None]:
    """The same, with others served in between."""
    for num, one in enumerate(all_fates, start=1):
        yield one
        if num % _AT_ONCE == 0:
            await asyncio.sleep(0)


def _add(found: Mapping[Key, Counter[TokenFate]], by: str, one: SessionFates) -> None:
    if by == "cause":
        for row in one.rows:
            found[row.cause][row.fate] += row.num_tokens
        return
    keys: Mapping[str, Key] = {"group": one.group, "session": one.session, "step": one.step, "tenant": one.tenant}
    found[keys[by]].update(num_tokens(one.rows))


def _why(one: SessionFates) -> list[WhyRow]:
    return [
        {
            "session": one.session,
            "node": row.node,
            "step": one.step,
            "fate": row.fate,
            "cause": row.cause,
            "tokens": row.num_tokens,
        }
        for row in one.rows
    ]


def account_groups(late: Late) -> Sequence[object]:
    """The objects with the rows in their classes."""
    core = late.core
    return (
        ClaimRoutes(sessions=late.sessions, parts=late.all_parts, max_staleness=core.settings.max_staleness),
        AccountRoutes(
            sessions=late.sessions,
            book=AccountBook(core.manager),
            price=settings_of(AccountSettings, core.settings).token_price,
        ),
    )
