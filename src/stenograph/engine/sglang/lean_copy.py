"""The client's copy of a chat reply of SGLang's, without the payloads for training (`--reply lean`). Pure."""

import msgspec

from stenograph.engine.reported import REPLAY_FIELDS, STAND_IN_TEXT, payload_apart

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def cut_replay(body: bytes) -> bytes:
    """A reply's body without `routed_experts` and `indexer_topk`; every other value is spelled as it came.

    SGLang writes them into each choice's `meta_info` and, in some versions, once more into `sglext`. A body with
    neither is returned as the same object. Takes bodies accepted by `decode_reply`.
    """
    rest, payload = payload_apart(body)
    cut = _cut(rest)
    return cut if payload is None or STAND_IN_TEXT not in cut else _cut(body)


def _cut(body: bytes) -> bytes:
    reply = _OBJECT.decode(body)
    choices = _LIST.decode(reply["choices"])
    cut = [_cut_within(choice, "meta_info") for choice in choices]
    sglext = _without_replay(reply["sglext"]) if "sglext" in reply else None
    if sglext is not None:
        reply["sglext"] = sglext
    elif all(choice is None for choice in cut):
        return body
    reply["choices"] = msgspec.Raw(
        msgspec.json.encode([old if new is None else new for old, new in zip(choices, cut, strict=True)])
    )
    return msgspec.json.encode(reply)


def _cut_within(raw: msgspec.Raw, name: str) -> msgspec.Raw | None:
    """The object without replay fields in its member `name`; None if there are none."""
    members = _OBJECT.decode(raw)
    cut = _without_replay(members[name])
    return None if cut is None else msgspec.Raw(msgspec.json.encode({**members, name: cut}))


def _without_replay(raw: msgspec.Raw) -> msgspec.Raw | None:
    if bytes(memoryview(raw)[:1]) != b"{":
        return None
    members = _OBJECT.decode(raw)
    kept = {name: value for name, value in members.items() if name not in REPLAY_FIELDS}
    return None if len(kept) == len(members) else msgspec.Raw(msgspec.json.encode(kept))
