"""The calls of `stenograph run` and `stenograph chat` to a server, by HTTP. Blocking: nothing else runs here."""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import quote, urlencode, urlsplit

TIMEOUT_S = 60.0
"""Longest time for one call: no turn is made by them."""

CONTENT_TIMEOUT_S = 600.0
"""Longest time for a call for a session's content: samples of a large one take the server minutes."""

STREAM_TIMEOUT_S = 120.0
"""Longest silence in a streamed reply; the server gives signs of life in it."""

_SHOWN_CHARS = 300


class CallFailed(Exception):
    """A call was refused or not answered; the message says why, in a line. `said` is the server's own, with its
    `status`; None if there was no answer."""

    def __init__(self, message: str, *, status: int | None = None, said: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.said = said


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A session's id and addresses: `base_url` ends with `/v1`, `root_url` does not. `agent_key` is its agent's: the
    session's token, on a server without keys its id."""

    id: str
    base_url: str
    root_url: str
    agent_key: str


class ServerCalls:
    """A server at an address, with a key if it needs one."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        is_local = (urlsplit(url).hostname or "") in ("127.0.0.1", "::1", "localhost", "0.0.0.0")
        handlers = [urllib.request.ProxyHandler({})] if is_local else []
        self._opener = urllib.request.build_opener(*handlers)

    def __repr__(self) -> str:
        return f"<ServerCalls {self.url}>"

    @contextlib.contextmanager
    def session(self) -> Generator[OpenSession]:
        """A new session, deleted at the end; if it is gone by then, it needs no deleting."""
        session = self.open_session({})
        try:
            yield session
        finally:
            with contextlib.suppress(CallFailed):
                self.delete(session.id)

    def open_session(self, options: Mapping[str, object]) -> OpenSession:
        """A new session with options as `POST /sessions` takes them. Raises CallFailed."""
        return _open(self._json("POST", "/sessions", options))

    def fork(self, session_id: str, place: Mapping[str, object]) -> OpenSession:
        """A fork of a session at a place, as `POST /sessions/{id}/fork` takes it. Raises CallFailed."""
        forks = self._json("POST", f"/sessions/{quote(session_id, safe='')}/fork", place)["forks"]
        return _open(cast("list[Mapping[str, object]]", forks)[0])

    def delete(self, session_id: str) -> None:
        """Delete a session. Raises CallFailed."""
        self._call("DELETE", f"/sessions/{session_id}")

    def model(self) -> str:
        """The name of the server's model."""
        listed = self._json("GET", "/v1/models")
        return str(cast("list[dict[str, object]]", listed["data"])[0]["id"])

    def view(self, session_id: str) -> Mapping[str, object]:
        """The session's metadata."""
        found = self._json("GET", f"/sessions/{session_id}?records=delta")
        return cast("Mapping[str, object]", found["metadata"])

    def drift(self, session_id: str) -> Mapping[str, object]:
        """The drift report of each line."""
        return self._json("GET", f"/sessions/{session_id}/drift")

    def why(self, session_id: str) -> list[dict[str, object]]:
        """The findings about the session, the worst first."""
        found = self._json("GET", f"/sessions/{session_id}/why")
        return cast("list[dict[str, object]]", found["findings"])

    def accounts(self, by: str, group: str | None) -> Mapping[str, object]:
        """The fate of all sampled tokens."""
        query = urlencode({"by": by} | ({} if group is None else {"group": group}))
        return self._json("GET", f"/accounts?{query}")

    def ledger(self, session_id: str) -> list[dict[str, object]]:
        """The rows of the session's requests."""
        rows: list[dict[str, object]] = []
        after: object = 0
        while after is not None:
            page = self._json("GET", f"/sessions/{session_id}/ledger?after={after}")
            rows += cast("list[dict[str, object]]", page["requests"])
            after = page["next"]
        return rows

    def samples(self, session_id: str, kind: str) -> bytes:
        """The session's samples in a format."""
        return self._call("POST", f"/sessions/{session_id}/samples", {"format": kind}, CONTENT_TIMEOUT_S)

    def content(self, path: str) -> bytes:
        """The content at a path, as it comes."""
        return self._call("GET", f"/{path}", timeout_s=CONTENT_TIMEOUT_S)

    def records(self, session_id: str) -> Sequence[Mapping[str, object]]:
        """The records of the session's main strand, each with its turn's additions."""
        found = self._json("GET", f"/sessions/{session_id}?records=delta")
        return cast("Sequence[Mapping[str, object]]", found["records"])

    def abort(self, session_id: str) -> None:
        """End the session's running turns; they keep their sampled tokens."""
        self._call("POST", f"/sessions/{session_id}/abort", {})

    def chunks(self, session_id: str, body: Mapping[str, object]) -> Generator[Mapping[str, object]]:
        """The chunks of a streamed chat, as they come; leaving early hangs up, and so abandons the turn.

        Raises CallFailed, also where the stream ends before the reply does.
        """
        path = f"/sessions/{session_id}/v1/chat/completions"
        with self._answer("POST", path, {**body, "stream": True}, STREAM_TIMEOUT_S) as response:
            for line in response:
                name, _, data = line.partition(b":")
                if name != b"data":
                    continue  # a sign of life, or the end of an event
                if data.strip() == b"[DONE]":
                    return
                chunk = cast("Mapping[str, object]", json.loads(data))
                if "error" in chunk:
                    raise CallFailed(_message_of(data.decode(errors="replace")))
                yield chunk
        raise CallFailed("the reply was cut: the connection ended before it did")

    def _json(self, method: str, path: str, body: object = None) -> dict[str, object]:
        content = self._call(method, path, body)
        try:
            return cast("dict[str, object]", json.loads(content))
        except ValueError as error:
            raise CallFailed(f"what answers {method} {path} is no Stenograph server") from error

    def _call(self, method: str, path: str, body: object = None, timeout_s: float = TIMEOUT_S) -> bytes:
        with self._answer(method, path, body, timeout_s) as response:
            return response.read()

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: object, timeout_s: float) -> Generator[http.client.HTTPResponse]:
        """The answer to a request. Its errors and those of reading it are CallFailed."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, **({} if data is None else {"content-type": "application/json"})}
        try:
            request = urllib.request.Request(self.url + path, data, headers, method=method)
            with self._opener.open(request, timeout=timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if error.code == http.HTTPStatus.UNAUTHORIZED:
                what = "another key than the given one" if self._headers else "a key"
                message = f"the server requires {what}: set --api-key or STENOGRAPH_API_KEY"
                raise CallFailed(message, status=error.code) from error
            said = _message_of(text)
            message = f"{method} {path.split('?', maxsplit=1)[0]}: {error.code} {said}"
            raise CallFailed(message, status=error.code, said=said) from error
        except urllib.error.URLError as error:
            reason = error.reason.strerror if isinstance(error.reason, OSError) else None
            raise CallFailed(f"the server does not answer: {reason or error.reason}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise CallFailed(f"the server does not answer: {error}") from error


def _open(opened: Mapping[str, object]) -> OpenSession:
    return OpenSession(
        id=str(opened["session_id"]),
        base_url=str(opened["base_url"]),
        root_url=str(opened["root_url"]),
        agent_key=str(opened.get("token", opened["session_id"])),
    )


def _message_of(text: str) -> str:
    """The message of an error, or the text in its place."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:_SHOWN_CHARS]
