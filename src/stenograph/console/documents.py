"""The page's data of one session, as the answers of a server by their paths: the content of a page in a file. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stenograph.console.tokens import TOKEN_BYTES, LineTurns, TokenLook, token_page
from stenograph.console.views import VocabularyRef, console_session, turn_page
from stenograph.console.vocabulary import vocabulary_of
from stenograph.core.drift import DriftReport
from stenograph.core.json_pieces import Written, json_whole
from stenograph.export.ledger_rows import LedgerPage, ledger_rows
from stenograph.export.why import session_findings
from stenograph.model.tokenizer import Tokenizer
from stenograph.session.facts import session_facts
from stenograph.session.session import Session
from stenograph.trajectory.strand_facts import leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDocuments:
    """A session's answers by their paths, in JSON and in bytes. The paths are those in the page's requests."""

    session_id: str
    documents: Mapping[str, bytes]
    contents: Mapping[str, bytes]


def shape_path(session_id: str) -> str:
    """The path of a session's shape."""
    return f"console/api/sessions/{session_id}"


def turns_path(session_id: str, leaf: int) -> str:
    """The path of a line's turns."""
    return f"{shape_path(session_id)}/turns?leaf={leaf}"


def tokens_path(session_id: str, leaf: int) -> str:
    """The path of a line's tokens."""
    return f"{shape_path(session_id)}/tokens?leaf={leaf}"


def vocabulary_path(digest: str) -> str:
    """The path of a vocabulary."""
    return f"console/api/vocabulary/{digest}"


def told_path(session_id: str, what: str) -> str:
    """The path of another route's answer on a session: `why`, `drift` or `ledger`."""
    return f"sessions/{session_id}/{what}"


def ids_of_page(page: bytes) -> Sequence[int]:
    """The distinct ids of a page of tokens."""
    ids: Sequence[int] = np.unique(np.frombuffer(page, "<u4", len(page) // TOKEN_BYTES)).tolist()
    return ids


def session_documents(
    session: Session, tokenizer: Tokenizer, reports: Mapping[int, DriftReport], drift: object
) -> SessionDocuments:
    """The answers for a session. `reports` has the drift of each line by its last node's id, `drift` is the drift
    route's answer on them. Its vocabulary has the session's ids alone."""
    facts, id_ = session_facts(session), session.id
    look, rows = TokenLook.of(facts), session.ledger.rows(session.ledger.num_rows)
    lines = leaves(facts.nodes)
    contents = {tokens_path(id_, leaf.id): token_page(LineTurns.of(leaf), 0, leaf.num_tokens, look) for leaf in lines}
    vocabulary = vocabulary_of(tokenizer, {one for page in contents.values() for one in ids_of_page(page)})
    contents[vocabulary_path(vocabulary.digest)] = vocabulary.content
    ref: VocabularyRef = {"hash": vocabulary.digest, "size": tokenizer.vocab_size}
    shape = console_session(
        facts,
        look,
        created_at=session.created_at,
        busy=False,
        num_requests=session.ledger.num_requests,
        vocabulary=ref,
    )
    ledger: LedgerPage = {
        "session_id": id_,
        "requests": ledger_rows(rows, facts),
        "num_requests": session.ledger.num_requests,
        "next": None,
    }
    told: dict[str, object] = {
        shape_path(id_): shape,
        told_path(id_, "why"): session_findings(facts, reports, rows, session.ledger.num_requests),
        told_path(id_, "drift"): drift,
        told_path(id_, "ledger"): ledger,
    }
    for leaf in lines:
        told[turns_path(id_, leaf.id)] = Written(turn_page(id_, leaf.line(), facts.by_node(), whole=True))
    documents = {path: json_whole(answer) for path, answer in told.items()}
    return SessionDocuments(session_id=id_, documents=documents, contents=contents)
