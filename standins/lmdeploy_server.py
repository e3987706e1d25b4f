"""A stand-in for an LMDeploy server: its routes and wire shapes over a real socket, without a model.

What it says is planned (planned_server.py). Wire shapes: LMDeploy's `serve/openai/protocol.py`,
`serve/openai/endpoints/generate.py`, `serve/openai/chat_completions/serving.py`, `serve/core/async_engine.py`.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from standins.faults import Answer
from standins.planned_server import AskedRequest, PlannedServer, Play, ReplyScript, utf8_text

GENERATE_PATH = "/generate"
CHAT_PATH = "/v1/chat/completions"
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "max_tokens",
    "stop",
    "stream",
)
_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
GENERATE_FIELDS = (
    *("session_id", "prompt", "input_ids", "return_logprob", "top_logprobs_num", "stop_token_ids"),
    *("return_routed_experts", *_SAMPLING, *_TEXT),
)
"""`GenerateReqInput`, of a version that tells alternatives."""
CHAT_FIELDS = (
    *("session_id", "model", "messages", "input_ids", "return_logprob", "return_token_ids", "logprobs", "top_logprobs"),
    *("seed", "response_format", "logit_bias", "stream_options", "return_routed_experts", *_SAMPLING, *_TEXT),
)
"""`ChatCompletionRequest`, of a version that takes ids."""


class LMDeployServer(PlannedServer):
    """An LMDeploy server.

    `generate_fields` and `chat_fields` are what its routes read, None where there is no such route; it shows them,
    unless `shows_fields` is false. `aborts`: it was started with `--enable-abort-handling`. `moe_shape`: layers, and
    experts that a token is routed to in each. Its aborts and hang-ups are noted by session id, as text.
    """

    def __init__(
        self,
        *,
        model: str = "stand-in",
        decode: Callable[[Sequence[int]], str] = utf8_text,
        answers: Callable[[AskedRequest], ReplyScript] | None = None,
        generate_fields: Sequence[str] | None = GENERATE_FIELDS,
        chat_fields: Sequence[str] | None = CHAT_FIELDS,
        shows_fields: bool = True,
        aborts: bool = True,
        moe_shape: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__(unplanned=ReplyScript(ids=(111, 107)), answers=answers, routes=None, remembers=True)
        self._model = model
        self._decode = decode
        self._fields = {GENERATE_PATH: generate_fields, CHAT_PATH: chat_fields}
        self._shows_fields = shows_fields
        self._aborts = aborts
        self._moe_shape = moe_shape

    def _is_generation(self, asked: AskedRequest, path: str) -> bool:
        return asked.method == "POST" and self._fields.get(path) is not None and "input_ids" in asked.json

    def id_of(self, asked: AskedRequest) -> str:
        return str(asked.json.get("session_id", -1))

    def _answer(self, asked: AskedRequest, path: str) -> Answer:
        match asked.method, path:
            case "GET", "/health":
                return _answer({"status": "healthy"}, self.health_status)
            case "GET", "/v1/models":
                return _answer(
                    {"object": "list", "data": [{"id": self._model, "object": "model", "root": self._model}]}
                )
            case "GET", "/openapi.json" if self._shows_fields:
                return _answer(self._openapi())
            case "POST", "/abort_request":
                return self._answer_abort(asked)
            case "POST", _ if self._fields.get(path) is not None:
                return _error(400, "You must specify exactly one of prompt or input_ids")
            case _:
                return _answer({"detail": "Not Found"}, 404)

    def _answer_abort(self, asked: AskedRequest) -> Answer:
        if not self._aborts:
            return Answer(status=501, content_type="text/plain", body=b"Enable with --enable-abort-handling flag.")
        session = self.id_of(asked)
        is_known = any(play.rid == session for play in self._plays)
        if session != "-1":
            self._abort([session])
        if self.abort_status == 200 and not is_known:
            return _error(400, f"Session {session} not found.")
        return Answer(status=self.abort_status, content_type="")

    def _openapi(self) -> dict[str, Any]:
        """The document that FastAPI makes of the routes, as far as anyone reads it."""
        paths: dict[str, Any] = {"/health": {"get": {}}}
        schemas: dict[str, Any] = {}
        for number, (path, fields) in enumerate(self._fields.items()):
            if fields is not None:
                name = f"Request{number}"
                schema = {"schema": {"$ref": f"#/components/schemas/{name}"}}
                paths[path] = {"post": {"requestBody": {"content": {"application/json": schema}, "required": True}}}
                schemas[name] = {"properties": {field: {"title": field} for field in fields}, "type": "object"}
        return {"openapi": "3.1.0", "info": {}, "paths": paths, "components": {"schemas": schemas}}

    # -- what it says of a generation

    def _refusal(self, script: ReplyScript, path: str) -> dict[str, Any]:
        error = {"message": "as planned", "type": "invalid_request_error", "code": script.status, "param": None}
        return {"error": error} if script.error_event else {**error, "object": "error"}

    def _whole(self, play: Play, path: str) -> dict[str, Any]:
        return self._part(play, path, first=0, end=len(play.ids), finish=play.finish, is_whole=True)

    def _parts(
        self, play: Play, path: str, *, num_sent: int, num_drawn: int, finish: str | None
    ) -> Sequence[dict[str, Any]]:
        """The sampled tokens, and a last part with the finish and the stop token, if there is one."""
        if finish is None:
            return [self._part(play, path, first=num_sent, end=num_drawn, finish=None)]
        last = num_drawn - (finish == "stop" and num_drawn > num_sent)
        parts = [
            self._part(play, path, first=num_sent, end=last, finish=None),
            self._part(play, path, first=last, end=num_drawn, finish=finish),
        ]
        if path == CHAT_PATH and play.asked.json.get("stream_options", {}).get("include_usage"):
            parts.append(self._chat([], usage=_usage(play, num_drawn)))
        return parts

    def _part(
        self, play: Play, path: str, *, first: int, end: int, finish: str | None, is_whole: bool = False
    ) -> dict[str, Any]:
        ids = list(play.ids[first:end])
        text = self._decode(ids)
        if finish == "error":
            ids, end, text = [], 0, "internal error happened, status code ResponseType.INTERNAL_ENGINE_ERROR"
        rows = [[logprob, id_] for id_, logprob in zip(ids, play.logprobs[first:end], strict=True)]
        experts = self._experts(play) if finish is not None else None
        if path == CHAT_PATH:
            choice: dict[str, Any] = {
                "index": 0,
                "finish_reason": finish,
                "output_ids": ids,
                "output_token_logprobs": rows or None,
            }
            message = {"role": "assistant", "content": text}
            choice |= {"message" if is_whole else "delta": message, "routed_experts": experts}
            if is_whole:
                return self._chat([choice], usage=_usage(play, end))
            return self._chat([{name: value for name, value in choice.items() if value is not None}])
        tops = [[[logprob, id_] for id_, logprob in row] for row in play.tops[first:end]]
        meta = {
            "prompt_tokens": play.num_prompt,
            "completion_tokens": end,
            "finish_reason": None if finish is None else {"type": finish},
            "output_token_logprobs": rows or None,
            "output_top_logprobs": tops or None,
            "routed_experts": experts,
        }
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _chat(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": self._model}
        return {**told, "choices": choices, **({} if usage is None else {"usage": usage})}

    def _experts(self, play: Play) -> list[list[list[int]]] | None:
        """The script's bytes, which are int32, as numbers by token, layer and choice."""
        if play.script.routed_experts is None:
            return None
        flat = array("i", play.script.routed_experts).tolist()
        layers, top_k = self._moe_shape
        rows = [flat[at : at + top_k] for at in range(0, len(flat), top_k)]
        return [rows[at : at + layers] for at in range(0, len(rows), layers)]


def _usage(play: Play, num_drawn: int) -> dict[str, Any]:
    return {
        "prompt_tokens": play.num_prompt,
        "completion_tokens": num_drawn,
        "total_tokens": play.num_prompt + num_drawn,
        "prompt_tokens_details": {"cached_tokens": play.script.num_cached},
    }


def _answer(told: object, status: int = 200) -> Answer:
    return Answer(status=status, body=json.dumps(told).encode())


def _error(status: int, message: str) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "code": status, "param": None, "object": "error"}
    return _answer(error, status)
