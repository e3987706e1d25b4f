"""Images in Anthropic's, OpenAI's Responses' and Gemini's requests: one medium each, by our own hash, or a refusal."""

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.chat import ChatRequest
from stenograph.core.errors import CallerError, InvalidRequest, UnrenderableMessage
from stenograph.core.messages import MEDIA_LIMITS, MediaLimits, Role
from stenograph.dialects.anthropic.request import decode_messages
from stenograph.dialects.base import Incoming
from stenograph.dialects.common.media import MediaWanted
from stenograph.dialects.gemini.request import decode_gemini
from stenograph.dialects.responses.request import decode_response
from tests.store_laws import medium

PICTURE, OTHER = b"\x89PNG one", b"\x89PNG other"
Part = dict[str, Any]


def text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def anthropic(parts: list[Part], *, in_result: bool = False, media: MediaLimits = MEDIA_LIMITS) -> ChatRequest:
    blocks = [_block(part) for part in parts]
    messages: list[Part] = [{"role": "user", "content": blocks}]
    if in_result:
        call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
        messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"model": "m", "max_tokens": 9, "messages": messages}
    return decode_messages(json.dumps(body).encode(), media=media)


def _block(part: Part) -> Part:
    if "text" in part:
        return {"type": "text", "text": part["text"]}
    if "url" in part:
        return {"type": "image", "source": {"type": "url", "url": part["url"]}}
    return {"type": "image", "source": {"type": "base64", "media_type": part["type"], "data": part["data"]}}


def responses(parts: list[Part], *, in_result: bool = False, media: MediaLimits = MEDIA_LIMITS) -> ChatRequest:
    items = [_item(part) for part in parts]
    sent: list[Part] = [{"role": "user", "content": items}]
    if in_result:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        sent = [call, {"type": "function_call_output", "call_id": "c", "output": items}]
    body = json.dumps({"model": "m", "input": sent}).encode()
    return decode_response(Incoming(body=body, media=media)).request


def _item(part: Part) -> Part:
    if "text" in part:
        return {"type": "input_text", "text": part["text"]}
    url = part.get("url", f"data:{part.get('type')};base64,{part.get('data')}")
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def gemini(parts: list[Part], *, in_result: bool = False, media: MediaLimits = MEDIA_LIMITS) -> ChatRequest:
    inside = [
        {"text": part["text"]} if "text" in part else {"inlineData": {"mimeType": part["type"], "data": part["data"]}}
        for part in parts
    ]
    contents: list[Part] = [{"role": "user", "parts": inside}]
    if in_result:
        call = {"functionCall": {"name": "f", "args": {}}}
        images = [part for part in inside if "inlineData" in part]
        result = {"functionResponse": {"name": "f", "response": {"a": 1}, "parts": images}}
        contents = [{"role": "model", "parts": [call]}, {"role": "user", "parts": [result]}]
    return decode_gemini(json.dumps({"contents": contents}).encode(), model="m", media=media)


Decode = Callable[..., ChatRequest]
ALL = pytest.mark.parametrize("decode", [anthropic, responses, gemini])
BY_URL = pytest.mark.parametrize("decode", [anthropic, responses])


def image(content: bytes, media_type: str = "image/png") -> Part:
    return {"type": media_type, "data": text_of(content)}


@ALL
def test_images_stand_where_they_were_among_the_texts_and_each_is_kept_once(decode: Decode) -> None:
    request = decode([{"text": "ab"}, image(PICTURE), image(OTHER), {"text": "c"}, image(PICTURE)])
    (message,) = request.messages
    assert (message.role, message.content) == (Role.USER, "abc")
    hashes = [hashlib.sha256(one).hexdigest() for one in (PICTURE, OTHER, PICTURE)]
    assert [(one.at, one.ref.sha256) for one in message.media] == list(zip((2, 2, 3), hashes, strict=True))
    assert [(one.ref.sha256, base64.b64decode(one.base64)) for one in request.media] == [
        (hashes[0], PICTURE),
        (hashes[1], OTHER),
    ]
    ref = message.media[0].ref
    assert (ref.kind, ref.media_type, ref.num_bytes) == ("image", "image/png", len(PICTURE))


@ALL
def test_a_screenshot_in_a_tools_result_is_the_tools_message(decode: Decode) -> None:
    request = decode([image(PICTURE)], in_result=True)
    message = request.messages[-1]
    assert message.role is Role.TOOL
    assert message.media[0].at == len(message.content or "")
    assert [one.ref for one in message.media] == [one.ref for one in request.media]


@ALL
@pytest.mark.parametrize(
    ("part", "kind", "said"),
    [
        ({"type": "image/png", "data": "QQ"}, InvalidRequest, "not base64"),
        ({"type": "image/png", "data": "Q Q="}, InvalidRequest, "not base64"),
        ({"type": "image/png", "data": "QR=="}, InvalidRequest, "not base64"),
        ({"type": "image/png", "data": "ä==="}, InvalidRequest, "not base64"),
        ({"type": "image/png", "data": ""}, InvalidRequest, "empty"),
        ({"type": "image/svg+xml", "data": "QQ=="}, UnrenderableMessage, "image/svg"),
        ({"type": "text/html", "data": "QQ=="}, UnrenderableMessage, "text/html"),
        ({"type": "", "data": "QQ=="}, UnrenderableMessage, "only image/png"),
    ],
)
def test_what_is_no_image_is_refused_at_its_place(decode: Decode, part: Part, kind: Any, said: str) -> None:
    if decode is gemini and part["data"] == "QQ":
        return  # Google's clients leave padding out
    with pytest.raises(kind, match=said) as refused:
        decode([{"text": "a"}, part])
    assert "/1" in (refused.value.param or "")


@ALL
def test_a_request_has_limits_of_bytes_and_number(decode: Decode) -> None:
    limits = MediaLimits(max_bytes=len(PICTURE), max_items=2)
    assert len(decode([image(PICTURE), image(PICTURE)], media=limits).media) == 1
    with pytest.raises(InvalidRequest, match="at most 2 images"):
        decode([image(PICTURE)] * 3, media=limits)
    with pytest.raises(InvalidRequest, match=f"at most {len(PICTURE)} bytes"):
        decode([image(OTHER)], media=limits)


@BY_URL
def test_a_url_is_refused_until_it_was_fetched(decode: Decode) -> None:
    urls = ["https://a.example/1.png", "https://a.example/2.png"]
    parts = [{"url": url} for url in (*urls, urls[0])]
    with pytest.raises(InvalidRequest, match="--fetch-media"):
        decode(parts)
    with pytest.raises(MediaWanted) as wanted:
        decode(parts, media=MediaLimits(fetches=True))
    assert list(wanted.value.places) == urls
    fetched = {url: medium(url.encode()) for url in urls}
    request = decode(parts, media=MediaLimits(fetches=True, fetched=fetched))
    assert [base64.b64decode(one.base64).decode() for one in request.media] == urls
    assert len(request.messages[0].media) == 3


@BY_URL
@pytest.mark.parametrize("url", ["file:///etc/passwd", "data:image/png,abc", "data:image/png;base64", "", "ftp://a/b"])
def test_another_url_is_refused(decode: Decode, url: str) -> None:
    with pytest.raises(CallerError):
        decode([{"url": url}])


def test_googles_clients_send_the_alphabet_of_urls() -> None:
    content = b"\xfb\xff\xfe\x00"
    data = base64.urlsafe_b64encode(content).rstrip(b"=").decode()
    assert "-" in data
    (item,) = gemini([{"type": "image/jpg", "data": data}]).media
    assert (item.base64, item.ref.media_type) == (base64.b64encode(content), "image/jpeg")


@ALL
@given(st.text(max_size=30))
def test_no_text_ends_in_another_error_than_a_refusal(decode: Decode, data: str) -> None:
    try:
        (item,) = decode([{"type": "image/png", "data": data}]).media
    except CallerError:
        return
    assert base64.b64encode(base64.b64decode(item.base64)) == item.base64


def test_the_model_has_no_images_of_its_own() -> None:
    contents = [
        {"role": "user", "parts": [{"text": "a"}]},
        {"role": "model", "parts": [{"inlineData": {"mimeType": "image/png", "data": "QQ=="}}]},
        {"role": "user", "parts": [{"text": "b"}]},
    ]
    with pytest.raises(UnrenderableMessage):
        decode_gemini(json.dumps({"contents": contents}).encode(), model="m")
    items = [{"role": "system", "content": [{"type": "input_image", "image_url": "data:image/png;base64,QQ=="}]}]
    with pytest.raises(UnrenderableMessage):
        decode_response(Incoming(body=json.dumps({"input": items}).encode()))
