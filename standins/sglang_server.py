"""A stand-in for an SGLang server: its routes and wire shapes over a real socket, without a model.

It says what a test planned, or something that never changes; it remembers all that it was asked (planned_server.py).
For a plan's faults see `Fault`. Wire shapes: SGLang's `entrypoints/openai/protocol.py` and `serving_chat.py`; see also
sglang_parts.py.
"""

import base64
import json
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from standins.faults import Answer
from standins.planned_server import (
    AskedRequest,
    PlannedServer,
    Play,
    ReplyScript,
    compact,
    utf8_ids,
    utf8_text,
)
from standins.sglang_parts import (
    SampledReply,
    StreamedStep,
    chat_events,
    chat_reply,
    finish_reason,
    generate_part,
)
from standins.weight_versions import CacheKey, lora_cards

CHAT_PATH = "/v1/chat/completions"
GENERATE_PATH = "/generate"
UNFLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or"
    " finish them, then call /flush_cache."
)
FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the"
    b" operation will not be performed.)\n"
)
MODEL_INFO = {
    "is_generation": True,
    "preferred_sampling_params": None,
    "load_format": "auto",
    "reasoning_parser": None,
    "tool_call_parser": "hermes",
    "disaggregation_mode": "null",
    "has_image_understanding": False,
    "has_audio_understanding": False,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
}
"""The rest of `/model_info`."""
SERVER_INFO = {
    "tool_call_parser": "hermes",
    "reasoning_parser": None,
    "tokenizer_worker_num": 1,
    "return_output_ids": False,
    "enable_cache_report": True,
}
"""The part of `/server_info` by which a server's chats can be streamed; recorded of 0.5.23."""


def made_up_score(at: int, id_: int) -> float:
    """The score of a token at a place."""
    return -(1 + (at * 31 + id_) % 97) / 16


def _is_scoring(body: dict[str, Any]) -> bool:
    sampling: dict[str, Any] = body.get("sampling_params") or {}
    return bool(sampling.get("max_new_tokens", 1) == 0)


def patches_of(image: str) -> int:
    """The number of ids for an image, a data URI: from 1 to 16."""
    return 1 + base64.b64decode(image.partition(",")[2])[-1] % 16


class SGLangServer(PlannedServer):
    """An SGLang server.

    An `abort_status` of 404 is a router's answer. `incremental`: streams have only what is new in each event, as with
    `--incremental-streaming-output`. `has_spans`: newer versions tell the spans of weight versions. `max_model_len` is
    what `/v1/models` tells, None for a router. `image_token` is repeated for each image as its last byte says; None:
    the model takes none. `reports` changes the ids that it tells of a prompt with images.
    """

    def __init__(
        self,
        *,
        model: str = "stand-in",
        encode: Callable[[str], list[int]] = utf8_ids,
        decode: Callable[[Sequence[int]], str] = utf8_text,
        stop_id: int | None = None,
        answers: Callable[[AskedRequest], ReplyScript] | None = None,
        routes: Callable[[AskedRequest], Awaitable[Answer | None]] | None = None,
        remembers: bool = True,
        incremental: bool = False,
        has_spans: bool = False,
        max_model_len: int | None = None,
        image_token: int | None = None,
        reports: Callable[[list[int]], list[int] | None] = lambda ids: ids,
    ) -> None:
        ids = tuple(encode("ok"))
        if stop_id is not None:
            ids = (*ids, stop_id)
        unplanned = ReplyScript(ids=ids, text="ok", matched=stop_id)
        super().__init__(unplanned=unplanned, answers=answers, routes=routes, remembers=remembers)
        self._model = model
        self._encode = encode
        self._decode = decode
        self._incremental = incremental
        self._has_spans = has_spans
        self._max_model_len = max_model_len
        self._image_token = image_token
        self._reports = reports
        self.server_info: dict[str, Any] | None = None
        """The answer to `/server_info`; None: there is no such route."""
        self.load: dict[str, Any] | None = None
        """The one rank in the answer to `/v1/loads`; None: there is no such route."""
        self.closed: list[str] = []
        """Sessions that were closed."""
        self.model_info_version: str | None = None
        """The name that `/model_info` has where it is not that of the weights: after an update in place."""
        self.num_unflushed = 0
        """Updates to come that find turns which have just ended, and do not flush the cache."""
        self._stands_in_place = False
        self._is_paused = False
        self._began_in_pause = set[str]()
        self._unheard = set[str]()
        self._heard_later = set[str]()

    def _is_generation(self, asked: AskedRequest, path: str) -> bool:
        return asked.method == "POST" and path in (CHAT_PATH, GENERATE_PATH) and not _is_scoring(asked.json)

    def id_of(self, asked: AskedRequest) -> str:
        return str(asked.json.get("rid", ""))

    def _cache_key(self, asked: AskedRequest) -> CacheKey:
        ids = asked.json.get("input_ids") or ()
        return CacheKey(ids, (asked.json.get("extra_key"), asked.json.get("cache_salt")))

    def _answer(self, asked: AskedRequest, path: str) -> Answer:
        match asked.method, path:
            case "POST", "/abort_request":
                is_all = asked.json.get("abort_all")
                self._abort([play.rid for play in self._plays] if is_all else [self.id_of(asked)])
                return Answer(status=self.abort_status, content_type="")
            case ("GET", "/health") | ("GET", "/model_info") if path == "/health" or self.health_status != 200:
                waits = self.health_status == 200 and not self._draws  # it is a generation
                return Answer(status=503 if waits else self.health_status, content_type="")
            case "POST", "/update_weights_from_disk" | "/load_lora_adapter" | "/unload_lora_adapter":
                is_lora = path.endswith("_adapter")
                return self._change_lora(path, asked.json) if is_lora else self._update_weights(asked.json)
            case "POST", "/close_session":
                self.closed.append(str(asked.json["session_id"]))
                return Answer(content_type="")
            case "POST", "/flush_cache":
                is_refused = self._stands_in_place and self.num_running > 0
                self._flush(goes_on=not is_refused)
                return Answer(status=400 if is_refused else 200, content_type="", body=b"" if is_refused else FLUSHED)
            case _:
                told = self._controlled(asked.method, path, asked.json)
                told = self._told(asked.method, path, asked.json) if told is None else told
                missing = {"detail": "Not Found", "path": urllib.parse.unquote(path)}
                body = json.dumps(missing if told is None else told).encode()
                return Answer(status=404 if told is None else 200, body=body)

    def _scored(self, body: dict[str, Any]) -> dict[str, Any]:
        """A prompt's log-probabilities, made up of ids and places; the first row is empty, as a real one's."""
        ids, start = body["input_ids"], body["logprob_start_len"]
        rows = [[made_up_score(at, ids[at]) if at > start else None, ids[at], None] for at in range(start, len(ids))]
        told = {"id": body["rid"], "input_token_logprobs": rows, "weight_version": self.weight_version or "default"}
        if num_top := body.get("top_logprobs_num"):
            best = [[-0.5 - place, place, None] for place in range(num_top)]
            told["input_top_logprobs"] = [None, *[best] * (len(rows) - 1)]
        return {"text": "", "output_ids": [], "meta_info": told}

    def _told(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer of a route that a proxy may reach; None where there is no such route."""
        match method, path:
            case "GET", "/v1/models":
                card = {"id": self._model, "object": "model", "created": 0, "owned_by": "sglang", "root": self._model}
                card |= {"parent": None, "max_model_len": self._max_model_len}
                return {"object": "list", "data": [card, *lora_cards(self.loras, self._model)]}
            case "GET", "/v1/loads" if self.load is not None:
                return {"loads": [self.load]}
            case "POST", "/tokenize":
                ids = self._encode(str(body.get("prompt", "")))
                return {"tokens": ids, "count": len(ids)}
            case "POST", "/detokenize":
                return {"text": self._decode(body.get("tokens", []))}
            case "POST", "/v1/embeddings":
                ids = self._encode(str(body.get("input", "")))
                vector = [float(len(ids)), float(sum(ids))]
                data = [{"object": "embedding", "index": 0, "embedding": vector}]
                return {"object": "list", "model": self._model, "data": data}
            case _:
                return None

    def _change_lora(self, path: str, body: dict[str, Any]) -> Answer:
        """A second one of a name is refused, and so is the end of one that is not there."""
        name, loads = str(body["lora_name"]), path == "/load_lora_adapter"
        problem = self.refusal if loads else None
        if loads is (name in self.loras):
            problem = f"LoRA adapter {name} is already loaded" if loads else f"LoRA with name {name} does not exist."
        if problem is None:
            self.loras = {key: folder for key, folder in self.loras.items() if key != name}
            self.loras |= {name: str(body["lora_path"])} if loads else {}
        told = {"success": problem is None, "error_message": problem, "loaded_adapters": self.loras}
        return Answer(status=200 if problem is None else 400, body=compact(told))

    def _update_weights(self, body: dict[str, Any]) -> Answer:
        """A failed one is a 400; without a version in the request, the one that there was stays."""
        problem, is_held = self.refusal, (self._stands_in_place and self.num_running > 0) or self.num_unflushed > 0
        message = "Succeeded to update model weights."
        if problem is None:
            self.num_unflushed = max(0, self.num_unflushed - 1)
            self.loaded.append(str(body.get("model_path")))
            before, self.weight_version = self.weight_version, body.get("weight_version") or self.weight_version
            message += f" Weight version updated to {self.weight_version}." if body.get("weight_version") else ""
            self._flush(goes_on=not is_held and body.get("flush_cache", True))
            if is_held and body.get("flush_cache", True):
                problem, self.model_info_version = UNFLUSHED, before or "default"
            else:
                self.model_info_version = None
        told = {
            "success": problem is None,
            "message": problem or message,
            "num_paused_requests": 0,
        }
        return Answer(status=200 if problem is None else 400, body=json.dumps(told).encode())

    def _controlled(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer of the other routes of weights, pauses and sessions; None where it is none of them."""
        told: dict[str, Any] | None = {}
        match method, path:
            case "POST", "/pause_generation":
                self.pause()
                self._is_paused = True
                self._stands_in_place = body.get("mode") == "in_place"
                if body.get("mode", "abort") == "abort":
                    self.abort_running()
                told = {"message": "Generation paused successfully.", "status": "ok"}
            case "POST", "/continue_generation":
                self.resume()
                self._is_paused = self._stands_in_place = False
                for play in self._plays:
                    if play.rid in self._heard_later:
                        play.aborted = True
                        play.go.set()
                told = {"message": "Generation continued successfully.", "status": "ok"}
            case "POST", "/update_weight_version":
                self.weight_version, self.model_info_version = str(body["new_version"]), None
                message = f"Weight version updated to {self.weight_version}"
                told = {"success": True, "message": message, "new_version": self.weight_version}
            case "GET", "/model_info":
                names = dict.fromkeys(("model_path", "served_model_name", "tokenizer_path"), self._model)
                told = {**names, "weight_version": self._named_version(), **MODEL_INFO}
                told["has_image_understanding"] = self._image_token is not None
            case "GET", "/server_info":
                told = self.server_info
            case "POST", "/generate":
                told = self._scored(body)
            case _:
                told = None
        return told

    def _flush(self, *, goes_on: bool) -> None:
        if goes_on and self.cache is not None:
            self.cache.flush()

    def _named_version(self) -> str:
        return self.model_info_version or self.weight_version or "default"

    # -- what it says of a generation

    def _refusal(self, script: ReplyScript, path: str) -> dict[str, Any]:
        if path == CHAT_PATH:
            told = {"object": "error", "message": "as planned", "type": "BadRequestError", "param": None}
            return {**told, "code": script.status}
        return {"error": {"message": "as planned"}}

    def _whole(self, play: Play, path: str) -> dict[str, Any]:
        sampled, num_drawn, script = self._sampled(play), len(play.ids), play.script
        if path == GENERATE_PATH:
            told = finish_reason(play.finish, script.matched, num_drawn)
            part = generate_part(sampled, num_drawn, told, self._decode, has_spans=self._has_spans)
            return part | self._prompt_report(play)
        return chat_reply(
            sampled,
            text=script.text if script.text is not None and play.ids == script.ids else self._decode(play.ids),
            reasoning=script.reasoning,
            tool_calls=script.tool_calls,
            finish=play.finish,
            matched=script.matched,
            model=self._model,
            token_text=lambda id_: self._decode([id_]),
            has_spans=self._has_spans,
        )

    def _parts(
        self, play: Play, path: str, *, num_sent: int, num_drawn: int, finish: str | None
    ) -> Sequence[dict[str, Any]]:
        if path == CHAT_PATH:
            return self._chat_parts(play, num_sent=num_sent, num_drawn=num_drawn, finish=finish)
        told = None if finish is None else finish_reason(finish, play.script.matched, num_drawn)
        first = num_sent if self._incremental else 0
        sampled, spans = self._sampled(play), self._has_spans
        part = generate_part(sampled, num_drawn, told, self._decode, first=first, has_spans=spans)
        if not num_sent:
            part["meta_info"]["response_sent_to_client_ts"] = 2.0
        return [part | self._prompt_report(play)]

    def _prompt_report(self, play: Play) -> dict[str, Any]:
        """The ids of a prompt, where they are asked for."""
        if not play.asked.json.get("return_prompt_token_ids"):
            return {}
        return {"prompt_token_ids": self._reports(self._expanded(play.asked))}

    def _problem_of_images(self, body: dict[str, Any]) -> str | None:
        """Places without an image are refused; images without a place are left out."""
        num_images = len(body.get("image_data") or ())
        num_places = sum(id_ == self._image_token for id_ in body.get("input_ids") or ())
        if not num_images or num_places <= num_images:
            return None
        return f"Prompt has {num_places} image placeholders but {num_images} image inputs were provided"

    def _expanded(self, asked: AskedRequest) -> list[int]:
        """The ids of a prompt, its placeholders replaced."""
        images, ids = iter(asked.json.get("image_data") or ()), list[int]()
        for id_ in asked.json.get("input_ids") or ():
            image = next(images, None) if id_ == self._image_token else None
            ids += [id_] * (1 if image is None else patches_of(image))
        return ids

    def _hears_aborts(self, play: Play) -> bool:
        """Aborts of a request that came in a pause, and waits for its end, are forgotten, with all that come later.
        Those of a request that stands still in place are heard when it goes on."""
        if self._is_paused and play.rid in self._began_in_pause:
            self._unheard.add(play.rid)
        elif self._stands_in_place:
            self._heard_later.add(play.rid)
        return play.rid not in self._unheard and not self._stands_in_place

    def _chat_parts(self, play: Play, *, num_sent: int, num_drawn: int, finish: str | None) -> Sequence[dict[str, Any]]:
        script, info = play.script, self.server_info or {}
        step = StreamedStep(
            num_sent=num_sent,
            num_drawn=num_drawn,
            text=self._text(play, num_drawn, finish)[len(self._text(play, num_sent, None)) :],
            reasoning=None if num_sent else script.reasoning,
            calls=script.tool_calls if finish not in (None, "abort") else (),
            finish=finish,
            matched=script.matched,
        )
        return chat_events(
            self._sampled(play),
            step,
            model=self._model,
            token_text=lambda id_: self._decode([id_]),
            has_parser=bool(info.get("tool_call_parser") or info.get("reasoning_parser")),
            reports_cache=bool(info.get("enable_cache_report")),
            asked=play.asked.json,
        )

    def _text(self, play: Play, num_drawn: int, finish: str | None) -> str:
        """The text of a stream's first tokens; before its end without the beginning of a character."""
        script = play.script
        if script.text is not None:
            return script.text[: len(script.text) * num_drawn // max(1, len(script.ids))]
        text = self._decode(script.ids[:num_drawn])
        return text if finish is not None else text.rstrip("\ufffd")

    def _next_script(self, asked: AskedRequest) -> ReplyScript:
        if self._is_paused:
            self._began_in_pause.add(self.id_of(asked))
        lora = asked.json.get("lora_path")
        if lora is not None and lora not in self.loras:
            message = f"Got LoRA adapter that has never been loaded: {lora}\nAll loaded adapters: {self.loras.keys()}."
            told = {"message": message, **({"code": 400} if asked.path == CHAT_PATH else {})}
            return ReplyScript(status=400, body=compact({"error": told} if asked.path == GENERATE_PATH else told))
        script, problem = super()._next_script(asked), self._problem_of_images(asked.json)
        if problem is not None:
            return ReplyScript(status=400, body=compact({"error": {"message": problem}}))
        if asked.json.get("stream") and asked.json.get("return_meta_info"):
            return ReplyScript(status=400)
        if asked.json.get("routed_experts_start_len", 0) <= len(asked.json.get("input_ids") or ()):
            return script
        message = "recv_req.routed_experts_start_len is higher than the number of input tokens"
        return ReplyScript(status=400, body=json.dumps({"error": {"message": message}}).encode())

    def _experts(self, play: Play) -> bytes | None:
        """The planned rows, one of each token but the last, from the row on that was asked for."""
        experts, num_rows = play.script.routed_experts, play.num_prompt + len(play.ids) - 1
        first = play.asked.json.get("routed_experts_start_len", 0)
        return experts if experts is None or not first else experts[len(experts) // num_rows * first :]

    def _sampled(self, play: Play) -> SampledReply:
        script = play.script
        return SampledReply(
            rid=play.rid,
            ids=play.ids,
            logprobs=play.logprobs,
            tops=play.tops,
            versions=play.versions + [self._version(script)] * (len(play.ids) - len(play.versions)),
            num_prompt=len(expanded := self._expanded(play.asked)),
            num_image=sum(id_ == self._image_token for id_ in expanded) if play.asked.json.get("image_data") else 0,
            num_cached=play.num_cached,
            routed_experts=self._experts(play),
            indexer_topk=script.indexer_topk,
            rows_have_text=script.triples,
            supports=(script.supports or [(id_,) for id_ in play.ids])
            if play.asked.json.get("return_sampling_mask")
            else None,
        )
