"""A stand-in for a vLLM server: its routes and wire shapes over a real socket, without a model.

What it says is planned (planned_server.py). Its keys and their types are those that vLLM 0.32 was recorded with
(tests/service/test_vllm_stand_in.py). It honours no grammar; what a prompt's tokens are
scored with, `scores` says.
"""

import base64
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from standins.faults import Answer
from standins.planned_server import (
    AskedRequest,
    Logprobs,
    PlannedServer,
    Play,
    ReplyScript,
    compact,
    utf8_text,
)
from standins.weight_versions import CacheKey, lora_cards, version_spans

GENERATE_PATH = "/inference/v1/generate"
COMPLETIONS_PATH = "/v1/completions"
GUARDED_ABORT_PATH = "/inference/v1/abort_requests"
ABORT_PATH = "/abort_requests"
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_WEIGHT_PATHS = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")

Range = dict[str, int]
_EMPTY = ("metrics", "kv_transfer_params", "ec_transfer_params")
_EMPTY_OF_GENERATE = ("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders")
_FINGERPRINT = "vllm-0.32.0-bef2b884"


def made_up_scores(ids: Sequence[int]) -> Sequence[float]:
    """The logprob of each id of a prompt but the first."""
    return [-at / 16 for at in range(1, len(ids))]


def expansion_length(image: bytes) -> int:
    """Number of placeholders for an image of these bytes: from 1 to 16."""
    return 1 + image[-1] % 16


def _as_it_is(ids: list[int], ranges: list[Range]) -> tuple[list[int], list[Range]]:
    return ids, ranges


class VLLMServer(PlannedServer):
    """A vLLM server.

    `scale_out`: it was started with `--enable-scale-out`; without, None is a version that has no such routes.
    `dev_mode`: it has the routes of `VLLM_SERVER_DEV_MODE=1` and for LoRAs. `tells_supports`: `--return-sampling-mask`.
    `models` are what it serves, and `max_model_len` is what it tells of their context.
    `image_token` is what it replaces by the expansion of an image; None: its model takes none. `report` changes what it
    tells of them. Aborts and hang-ups are noted under vLLM's own ids. `requests` are those with a script; questions for
    the scores of a prompt are in `asked` alone.
    """

    def __init__(
        self,
        *,
        models: Sequence[str] = ("stand-in",),
        max_model_len: int | None = 4096,
        scale_out: bool | None = True,
        dev_mode: bool = False,
        tells_supports: bool = False,
        decode: Callable[[Sequence[int]], str] = utf8_text,
        scores: Callable[[Sequence[int]], Sequence[float]] = made_up_scores,
        answers: Callable[[AskedRequest], ReplyScript] | None = None,
        image_token: int | None = None,
        report: Callable[[list[int], list[Range]], tuple[list[int], list[Range]] | None] = _as_it_is,
    ) -> None:
        super().__init__(unplanned=ReplyScript(ids=(111, 107)), answers=answers, routes=None, remembers=True)
        self.scale_out = scale_out
        self.dev_mode = dev_mode
        self._models = models
        self._max_model_len = max_model_len
        self._tells_supports = tells_supports
        self._decode = decode
        self._scores = scores
        self._image_token = image_token
        self._report = report

    def _is_generation(self, asked: AskedRequest, path: str) -> bool:
        if asked.method != "POST" or "prompt_logprobs" in _sampling(asked):
            return False
        if path == GENERATE_PATH:
            return bool(self.scale_out) and bool(asked.json.get("token_ids")) and "sampling_params" in asked.json
        return path == COMPLETIONS_PATH

    def id_of(self, asked: AskedRequest) -> str:
        own = asked.header("x-request-id") or str(asked.json.get("request_id", ""))
        return f"generate-tokens-{own}" if asked.path == GENERATE_PATH else f"cmpl-{own}-0"

    def _cache_key(self, asked: AskedRequest) -> CacheKey:
        model = str(asked.json.get("model"))
        return CacheKey(_prompt(asked), (asked.json.get("cache_salt"), model, self.loras.get(model)))

    def _answer(self, asked: AskedRequest, path: str) -> Answer:
        match asked.method, path:
            case "GET", "/health":
                return Answer(status=self.health_status, content_type="")
            case "GET", "/v1/models":
                told: dict[str, Any] = {"object": "model", "created": 0, "owned_by": "vllm", "parent": None}
                told |= {"permission": [], "max_model_len": self._max_model_len}
                cards = [{"id": name, "root": name, **told} for name in self._models]
                cards += lora_cards(self.loras, self._models[0])
                return Answer(body=compact({"object": "list", "data": cards}))
            case "GET", "/weight_info" if self.dev_mode:
                return Answer(body=compact({"weight_version": self.weight_version or "default"}))
            case _ if path not in self._paths():
                return Answer(status=404, body=b'{"detail":"Not Found"}')
            case "POST", _:
                return self._answer_post(asked, path)
            case _:
                return Answer(status=405, body=b'{"detail":"Method Not Allowed"}')

    def _answer_lora(self, asked: AskedRequest, path: str) -> Answer:
        """The routes of `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, from the source of 0.32."""
        name = str(asked.json["lora_name"])
        if path == LOAD_PATH:
            if self.refusal is not None:
                return _error(500, self.refusal, "InternalServerError")
            self.loras[name] = str(asked.json["lora_path"])
            return Answer(body=f"Success: LoRA adapter '{name}' added successfully.".encode())
        if self.loras.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return Answer(body=f"Success: LoRA adapter '{name}' removed successfully.".encode())

    def _answer_post(self, asked: AskedRequest, path: str) -> Answer:
        if path in (LOAD_PATH, UNLOAD_PATH):
            return self._answer_lora(asked, path)
        if path in (GENERATE_PATH, GUARDED_ABORT_PATH) and not self.scale_out:
            return _error(403, "Scale-out endpoints are disabled.", "PermissionDeniedError")
        if path in _WEIGHT_PATHS:
            return self._answer_control(asked, path)
        is_abort = path in (ABORT_PATH, GUARDED_ABORT_PATH)
        return self._answer_abort(asked, path) if is_abort else self._answer_scores(asked, path)

    def _paths(self) -> Sequence[str]:
        guarded = [] if self.scale_out is None else [GENERATE_PATH, GUARDED_ABORT_PATH]
        of_mode = [ABORT_PATH, LOAD_PATH, UNLOAD_PATH, *_WEIGHT_PATHS]
        return [COMPLETIONS_PATH, *guarded, *(of_mode if self.dev_mode else [])]

    def _answer_control(self, asked: AskedRequest, path: str) -> Answer:
        """The routes of its development mode for weights and pauses."""
        match path:
            case "/pause":
                self.pause()
                if asked.path.endswith("mode=abort"):
                    self.abort_running()
                return Answer(body=compact({"status": "paused"}))
            case "/resume":
                self.resume()
                return Answer(body=compact({"status": "resumed"}))
            case "/collective_rpc":
                if self.refusal is not None:
                    return _error(500, self.refusal, "InternalServerError")
                self.loaded.append(str(asked.json["kwargs"]["weights_path"]))
                return Answer(body=compact({"results": [None]}))
            case "/update_weight_version":
                self.weight_version = str(asked.json["new_version"])
                return Answer(body=compact({"success": True, "new_version": self.weight_version}))
            case _:
                if self.cache is not None:
                    self.cache.flush()
                return Answer(body=compact({"success": True}))

    def _answer_abort(self, asked: AskedRequest, path: str) -> Answer:
        """Every id is told as aborted, also one that is none; without any, one of the two routes aborts all."""
        ids: list[str] = asked.json.get("request_ids") or []
        if not ids and path == ABORT_PATH:
            ids = [play.rid for play in self._plays]
        self._abort(ids)
        if path == GUARDED_ABORT_PATH:
            return Answer(status=self.abort_status, content_type="")
        return Answer(status=self.abort_status, body=json.dumps({"status": "aborted", "aborted": len(ids)}).encode())

    def _answer_scores(self, asked: AskedRequest, path: str) -> Answer:
        """The model's score of a prompt; for any other question without a prompt, the error."""
        ids, _ = self._effective(asked)
        if not ids or "prompt_logprobs" not in _sampling(asked):
            return _error(400, "1 validation error", "Bad Request")
        if self._max_model_len is not None and len(ids) >= self._max_model_len:
            refused = (
                f"The decoder prompt (length {len(ids)}) plus the number of requested output tokens (at least 1) is"
            )
            return _error(
                400, f"{refused} longer than the maximum model length of {self._max_model_len}.", "Bad Request"
            )
        scored = zip(ids[1:], self._scores(ids), strict=True)
        rows = [None, *({str(id_): {"logprob": logprob, "rank": 1}} for id_, logprob in scored)]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": [0]}
        if allowed := _sampling(asked).get("allowed_token_ids"):
            choice |= self._forced(ids, allowed[0], path)
        if path == COMPLETIONS_PATH:
            return Answer(body=compact({"id": self.id_of(asked), "choices": [{**choice, "prompt_logprobs": rows}]}))
        version = self.weight_version or "default"
        choice["weight_versions"] = [{"version": version, "start": 0, "end": 1}]
        told = {"request_id": self.id_of(asked), "choices": [choice], "prompt_logprobs": rows}
        return Answer(body=compact(told))

    def _forced(self, ids: Sequence[int], allowed: int, path: str) -> dict[str, Any]:
        """The only token allowed after `ids`, with its logprob before the others were ruled out."""
        logprob = self._scores([*ids, allowed])[-1]
        if path == GENERATE_PATH:
            row = {"token_id": allowed, "logprob": logprob, "top_logprobs": [{"token_id": allowed, "logprob": logprob}]}
            return {"token_ids": [allowed], "logprobs": {"content": [row]}}
        named = f"token_id:{allowed}"
        told = {"tokens": [named], "token_logprobs": [logprob], "top_logprobs": [{named: logprob}]}
        return {"token_ids": [allowed], "logprobs": told}

    # -- what it says of a generation

    def _next_script(self, asked: AskedRequest) -> ReplyScript:
        model = asked.json.get("model")
        if model is None or model in (*self._models, *self.loras):
            return super()._next_script(asked)
        error = {"message": f"The model `{model}` does not exist.", "type": "NotFoundError", "param": "model"}
        return ReplyScript(status=404, body=compact({"error": {**error, "code": 404}}))

    def _refusal(self, script: ReplyScript, path: str) -> dict[str, Any]:
        error = {"message": "as planned", "type": "BadRequestError", "param": None, "code": script.status}
        return {"error": error}

    def _whole(self, play: Play, path: str) -> dict[str, Any]:
        num = len(play.ids)
        choice = self._choice(play, path, first=0, end=num, finish=play.finish)
        usage: dict[str, Any] = {**self._usage(play, num), "completion_tokens_details": None}
        usage["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
        top = {**self._top(play.rid, path), **dict.fromkeys(_EMPTY)}
        if path == GENERATE_PATH:
            top |= {"model": self._models[0], "created": 0, **dict.fromkeys(_EMPTY_OF_GENERATE), **self._media(play)}
        else:
            choice |= {"prompt_logprobs": None, "prompt_token_ids": _prompt(play.asked)}
            top |= {"service_tier": None, "system_fingerprint": _FINGERPRINT}
        return {**top, "choices": [choice], "usage": usage}

    def _parts(
        self, play: Play, path: str, *, num_sent: int, num_drawn: int, finish: str | None
    ) -> Sequence[dict[str, Any]]:
        top, parts = self._top(play.rid, path), list[dict[str, Any]]()
        # The completions route tells nothing of a generation that was aborted before it drew anything.
        if num_drawn or path == GENERATE_PATH:
            choice = self._choice(play, path, first=num_sent, end=num_drawn, finish=finish)
            if path == COMPLETIONS_PATH:
                choice["prompt_token_ids"] = None if num_sent else _prompt(play.asked)
            told = {} if num_sent else self._media(play)
            parts.append({**top, "choices": [choice], **({"usage": None, **told} if path == GENERATE_PATH else {})})
        if finish is not None and play.asked.json.get("stream_options", {}).get("include_usage"):
            last = {"system_fingerprint": _FINGERPRINT} if path == COMPLETIONS_PATH else {}
            parts.append({**top, "choices": [], "usage": self._usage(play, num_drawn), **last})
        return parts

    def _top(self, rid: str, path: str) -> dict[str, Any]:
        if path == GENERATE_PATH:
            return {"request_id": rid, "output_mode": "tokens"}
        return {"id": rid.removesuffix("-0"), "object": "text_completion", "created": 0, "model": self._models[0]}

    def _usage(self, play: Play, num_drawn: int) -> dict[str, Any]:
        num_prompt = len(self._effective(play.asked)[0])
        details = {"cached_tokens": play.num_cached}
        total = {"total_tokens": num_prompt + num_drawn, "prompt_tokens_details": details}
        return {"prompt_tokens": num_prompt, "completion_tokens": num_drawn, **total}

    def _media(self, play: Play) -> dict[str, Any]:
        """Its report of the prompt, where it is asked for."""
        if not play.asked.json.get("return_token_ids"):
            return {}
        told = self._report(*self._effective(play.asked))
        if told is None:
            return {}
        ids, found = told
        return {"prompt_token_ids": ids, "mm_placeholders": {"image": found} if found else None}

    def _effective(self, asked: AskedRequest) -> tuple[list[int], list[Range]]:
        """The ids of the prompt, each placeholder replaced as its image's bytes say, and where the expansions are."""
        ids, found = list[int](), list[Range]()
        images = iter(asked.json.get("content_parts", ()))
        for id_ in _prompt(asked):
            image = next(images, None) if id_ == self._image_token else None
            if image is not None:
                length = expansion_length(base64.b64decode(image["url"].partition(",")[2]))
                found.append({"offset": len(ids), "length": length})
                ids += [id_] * (length - 1)
            ids.append(id_)
        return ids, found

    def _choice(self, play: Play, path: str, *, first: int, end: int, finish: str | None) -> dict[str, Any]:
        script, ids = play.script, list(play.ids[first:end])
        tops = play.tops[first:end] or [[] for _ in ids]
        drawn = list(zip(ids, play.logprobs[first:end], tops, strict=True))
        is_generate = path == GENERATE_PATH
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": finish,
            "stop_reason": script.matched if finish == "stop" else None,
            "logprobs": _generate_logprobs(drawn) if is_generate else self._completion_logprobs(drawn),
        }
        if not is_generate:
            choice["text"] = self._decode(ids)
        if is_generate or not play.asked.json.get("stream"):
            experts = None if finish is None else _new_rows(script.routed_experts, play.asked)
            choice["routed_experts"] = None if experts is None else base64.b64encode(experts).decode()
        if is_generate:
            versions = play.versions + [self._version(script)] * (len(play.ids) - len(play.versions))
            choice["weight_versions"] = None if finish is None else version_spans(versions[:end])
            is_whole = not play.asked.json.get("stream")
            told = (script.supports or [(id_,) for id_ in play.ids])[first:end]
            choice["sampling_mask"] = told if is_whole and self._tells_supports else None
        return choice

    def _completion_logprobs(self, drawn: Sequence[tuple[int, float, Logprobs]]) -> dict[str, Any]:
        return {
            "tokens": [f"token_id:{id_}" for id_, _, _ in drawn],
            "token_logprobs": [logprob for _, logprob, _ in drawn],
            "top_logprobs": [
                {f"token_id:{top}": told for top, told in ((id_, logprob), *tops)} for id_, logprob, tops in drawn
            ],
            "text_offset": [0 for _ in drawn],
        }


def _new_rows(experts: bytes | None, asked: AskedRequest) -> bytes | None:
    """A .npy file of experts without the rows of the prompt that were not asked for."""
    first = _sampling(asked).get("routed_experts_prompt_start", 0)
    if experts is None or not first:
        return experts
    file = io.BytesIO()
    np.save(file, np.load(io.BytesIO(experts))[first:])
    return file.getvalue()


def _generate_logprobs(drawn: Sequence[tuple[int, float, Logprobs]]) -> dict[str, Any]:
    """Each drawn token, and first of the alternatives again."""
    rows: list[dict[str, Any]] = []
    for id_, logprob, tops in drawn:
        told = {id_: logprob} | dict(tops)
        ranked = [{"token_id": top, "logprob": value, "rank": at} for at, (top, value) in enumerate(told.items(), 1)]
        rows.append({"token_id": id_, "logprob": logprob, "rank": 1, "top_logprobs": ranked})
    return {"content": rows}


def _prompt(asked: AskedRequest) -> list[int]:
    told: list[int] = asked.json.get("token_ids") or asked.json.get("prompt") or []
    return told


def _sampling(asked: AskedRequest) -> dict[str, Any]:
    """The sampling parameters, which stand among all else in one of the routes."""
    told: dict[str, Any] = asked.json.get("sampling_params", asked.json)
    return told


def _error(status: int, message: str, kind: str) -> Answer:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return Answer(status=status, body=compact({"error": error}))
