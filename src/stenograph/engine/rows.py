"""Reads sampled tokens as engines write them: decodes bodies, reads rows of tokens, and checks them. Pure.

Owns the decoding of a body and the law broken by a wrong type, for every engine; rows of tokens and the finish
reason as SGLang and LMDeploy write them in each `meta_info`; and the joining of a stream of rows to one list. The rest
of a `meta_info` is read by reported.py. Knows no route. The laws here:

    utf8                    the whole body is UTF-8, also where nobody reads it
    json                    it is JSON, with nothing after it
    shape                   its fields have the right types
    has_logprobs, has_completion_tokens     the sampled tokens are there
    row_shape               a sampled token is [logprob, id] or [logprob, id, text or null]
    logprob_is_finite       a logprob is a finite number
    id_in_vocab             a token's id is an integer in [0, vocabulary)
    count_agrees            there are `completion_tokens` tokens: in a stream, with the earlier ones
    stream_extends          a list of all tokens so far begins with the earlier ones
    ids_agree               `output_ids`, where they are reported, are the ids of the rows
    prompt_agrees           `prompt_tokens`, where it is reported, is the number of ids sent
    has_tokens              no token means an aborted generation
    request_agrees          the reply's id is the `rid` of the request sent
    finish_reason           the reason is a known one

Field names: SGLang's `managers/tokenizer_manager.py`.
"""

import re
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.types import ID_TYPECODE, FinishReason, token_ids
from stenograph.engine.columns import STAND_IN_ID, Columns, cut_columns
from stenograph.engine.validate import are_in_vocab, new_logprobs

T = TypeVar("T")
Rows = Sequence["Row"] | Columns
Natural = Annotated[int, msgspec.Meta(ge=0)]
Laws = Sequence[tuple[re.Pattern[str], str]]
"""Patterns of msgspec's words for the place of a wrong type, each with its law; the first counts."""

LARGE_PAYLOAD_BYTES = 64 * 1024
"""A shorter payload is decoded with all else."""
MAX_SHOWN_BITS = 128


_NULL = msgspec.Raw(b"null")
"""In the place of a missing report. A payload is megabytes of text, and is read where it is kept."""


class Row(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """`[logprob, id]` or `[logprob, id, text]`; as an array-like struct, half the cost of a tuple (measured)."""

    logprob: float
    id: Natural
    text: str | None = None


class TopRow(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """As `Row`; a token ruled out by the grammar has the logprob null."""

    logprob: float | None
    id: Natural
    text: str | None = None


class UsageDetails(msgspec.Struct, gc=False):
    """The prompt's part of `usage`."""

    cached_tokens: Natural | None = None


class EngineUsage(msgspec.Struct):
    """Numbers of tokens, in OpenAI's field names, common to engines."""

    prompt_tokens: Natural
    completion_tokens: Natural
    prompt_tokens_details: UsageDetails | None = None

    @property
    def num_cached(self) -> int:
        """Cached tokens of the prompt; 0 where not reported."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class ErrorWithin(msgspec.Struct):
    """An error in the place of a reply. Outside of a stream, the same has a status of its own."""

    message: str = ""
    code: int | str | None = None

    @property
    def status(self) -> int:
        """The status it names; 400 where it names none."""
        return self.code if isinstance(self.code, int) else 400


def error_of(told: ErrorWithin | str) -> ErrorWithin:
    """The error, also where it is a text alone."""
    return ErrorWithin(message=told) if isinstance(told, str) else told


class MetaFinish(msgspec.Struct):
    """The end of a generation. An abort due to a failure has a `status_code`."""

    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class MetaVersion(msgspec.Struct, gc=False):
    """Output tokens `[start, end)` were sampled by weights `version`."""

    version: str | int
    start: Natural
    end: Natural


class MetaInfo(msgspec.Struct):
    """Everything reported about one generation."""

    completion_tokens: Natural
    id: str | None = None
    prompt_tokens: Natural | None = None
    output_token_logprobs: list[Row] | None = None
    output_top_logprobs: list[list[TopRow] | None] | None = None
    cached_tokens: Natural | None = None
    weight_version: str | int | None = None
    weight_versions: list[MetaVersion] | None = None
    output_token_sampling_mask: list[list[Natural]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    finish_reason: MetaFinish | str | None = None
    routed_experts: msgspec.Raw = _NULL
    indexer_topk: msgspec.Raw = _NULL

    @property
    def has_replay(self) -> bool:
        """Whether it reports any payload for a replay."""
        return self.routed_experts is not _NULL or self.indexer_topk is not _NULL


def laws(*pairs: tuple[str, str]) -> Laws:
    """Patterns and their laws."""
    return [(re.compile(pattern), law) for pattern, law in pairs]


META_LAWS = laws(
    (r"output_token_logprobs\[\d+\]\[0\]`$", "logprob_is_finite"),
    (r"output_token_logprobs\[\d+\]\[1\]`$", "id_in_vocab"),
    (r"output_token_logprobs\[\d+\]|^Expected `array` of at most", "row_shape"),
    (r"output_token_logprobs", "has_logprobs"),
    (r"output_token_sampling_logprobs", "logprob_is_finite"),
    (r"output_token_sampling_mask", "support_of_token"),
    (r"output_ids", "ids_agree"),
    (r"completion_tokens", "has_completion_tokens"),
    (r"weight_versions", "versions_agree"),
    (r"routed_experts|indexer_topk", "replay_is_base64"),
    (r"finish_reason", "finish_reason"),
)


def decoded(decoder: "msgspec.json.Decoder[T]", body: bytes, known: Laws, *, in_parts: bool = False) -> T:
    """Read a body, once; `in_parts`, so that the raw values in it are read later, and held to UTF-8 there. Raises
    UpstreamInvalid, naming the broken law, and nothing else."""
    try:
        if not in_parts and not body.isascii():
            body.decode()  # msgspec does not look into strings that it skips
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise UpstreamInvalid("utf8", f"{error.reason} at byte {error.start}") from error
    except msgspec.ValidationError as error:
        text = str(error)
        law = next((law for pattern, law in known if pattern.search(text)), "shape")
        raise UpstreamInvalid(law, text) from error
    except msgspec.DecodeError as error:
        raise UpstreamInvalid("json", f"{error}; the reply begins {body[:80]!r}") from error
    except RecursionError as error:
        raise UpstreamInvalid("shape", "the reply is nested too deeply") from error


_STAND_IN = [Row(logprob=0.0, id=STAND_IN_ID)]


def decoded_apart(
    decoder: "msgspec.json.Decoder[T]", body: bytes, known: Laws, meta_of: Callable[[T], MetaInfo | None]
) -> tuple[T, Columns | None]:
    """Read a body, and its rows as columns where they can be read so; then there is one row in their place.

    `meta_of` finds the report about the generation. Raises as `decoded` does.
    """
    cut = cut_columns(body)
    if cut is not None:
        rest, columns = cut
        try:
            told = decoded(decoder, rest, known)
        except UpstreamInvalid:
            return decoded(decoder, body, known), None
        meta = meta_of(told)
        if meta is not None and meta.output_token_logprobs == _STAND_IN:
            return told, columns
    return decoded(decoder, body, known), None


_REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def reason_of(told: str) -> FinishReason:
    """The finish reason in our words. Raises UpstreamInvalid for an unknown reason."""
    if told not in _REASONS:
        raise UpstreamInvalid("finish_reason", f"unknown finish reason {told[:80]!r}")
    return _REASONS[told]


class SampledTokens(msgspec.Struct, kw_only=True, eq=False):
    """All tokens of one generation so far, and the additions of the next part of its reply.

    A part has either all tokens so far or only new ones, as the server was started: the count of all of them, in every
    part, tells the two apart. Nothing is doubled and nothing is lost, or UpstreamInvalid is raised.
    """

    vocab_size: int
    num_prompt: int | None
    """The number of ids sent; None does not ask."""
    ids: "array[int]" = msgspec.field(default_factory=token_ids)
    logprobs: "array[float]" = msgspec.field(default_factory=new_logprobs)

    def __repr__(self) -> str:
        return f"<SampledTokens {len(self.ids)} ids>"

    def take(
        self, rows: Rows | None, *, num_sampled: int, reason: FinishReason | None, num_prompt: int | None
    ) -> tuple["array[int]", "array[float]"]:
        """The new ids and logprobs of a part that reports `num_sampled` tokens in all, after a prompt of `num_prompt`,
        if it says so; `reason` where it ends."""
        start = len(self.ids)
        if rows is None:
            # SGLang leaves the list out where a generation was aborted before it ran.
            if num_sampled != start or reason not in (None, FinishReason.ABORT):
                raise UpstreamInvalid("has_logprobs", "meta_info has no output_token_logprobs")
            rows = ()
        if len(rows) != num_sampled - start:
            rows = self._without_known(rows, num_sampled)
        new = checked_columns(rows, self.vocab_size)
        self.ids.extend(new[0])
        self.logprobs.extend(new[1])
        if len(self.ids) == start == 0 and reason not in (None, FinishReason.ABORT):
            raise UpstreamInvalid("has_tokens", "the engine sampled no token, and did not report an abort")
        if num_prompt is not None and self.num_prompt not in (None, num_prompt):
            raise other_prompt(self.num_prompt, num_prompt)
        return new

    def check_output_ids(self, told: Sequence[int] | None, *, num_new: int, reason: FinishReason | None) -> None:
        """Hold `output_ids` against the rows: they are all ids so far, or the new ones.

        With an abort of a waiting request, SGLang repeats the last id alone.
        """
        if told is None:
            return
        given, ids = list(told), self.ids.tolist()
        if given in (ids, ids[len(ids) - num_new :]) or (reason is FinishReason.ABORT and given == ids[-1:]):
            return
        raise UpstreamInvalid("ids_agree", f"{len(given)} output_ids are not the ids of the tokens' rows")

    def _without_known(self, rows: Rows, num_sampled: int) -> Rows:
        """The new rows of a list of all so far. Raises UpstreamInvalid for any other."""
        num_before = len(self.ids)
        if len(rows) != num_sampled:
            after = f" after {num_before} that came before" if num_before else ""
            detail = f"{short(num_sampled)} completion tokens, but {len(rows)} in output_token_logprobs{after}"
            raise UpstreamInvalid("count_agrees", detail)
        before = rows[:num_before]
        if _lists(before) != (self.ids.tolist(), self.logprobs.tolist()):
            raise UpstreamInvalid(
                "stream_extends",
                f"the list of {len(rows)} tokens does not begin with the {num_before} tokens received before",
            )
        return rows[num_before:]


def other_prompt(num_sent: int | None, num_told: int) -> UpstreamInvalid:
    """The error of a prompt with a reported size other than the size sent."""
    return UpstreamInvalid(
        "prompt_agrees",
        f"{num_sent} ids were sent, but the engine reports {short(num_told)} prompt tokens:"
        " it does not know input_ids, or made a prompt of its own",
    )


def checked_columns(rows: Rows, vocab_size: int) -> tuple["array[int]", "array[float]"]:
    """The ids and logprobs of rows. Raises UpstreamInvalid for an id outside the vocabulary."""
    if isinstance(rows, Columns):
        ids, logprobs = rows.ids, rows.logprobs
    else:
        found, num = [row.id for row in rows], len(rows)
        try:  # packed: an array takes twice as long for a list
            ids = array(ID_TYPECODE, struct.pack(f"{num}{ID_TYPECODE}", *found))
        except struct.error:
            check_ids(found, vocab_size)
            raise
        logprobs = array("d", struct.pack(f"{num}d", *[row.logprob for row in rows]))
    if not are_in_vocab(ids, vocab_size):
        check_ids(ids, vocab_size)
    return ids, logprobs


def _lists(rows: Rows) -> tuple[list[int], list[float]]:
    if isinstance(rows, Columns):
        return rows.ids.tolist(), rows.logprobs.tolist()
    return [row.id for row in rows], [row.logprob for row in rows]


def check_ids(ids: Iterable[int], vocab_size: int) -> None:
    """The decoder takes only integers, and none below 0; JSON has no NaN and no infinity."""
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise UpstreamInvalid("id_in_vocab", f"{short(largest)} is not a token id: the vocabulary has {vocab_size} ids")


def short(number: int) -> str:
    """Numbers of any length in an error message; `str` refuses those of thousands of digits."""
    return str(number) if number.bit_length() <= MAX_SHOWN_BITS else f"a number of {number.bit_length()} bits"


def check_request(told: str | None, request_id: str) -> None:
    """A reply is to the request sent: SGLang gives back the `rid`. Raises UpstreamInvalid."""
    if told != request_id:
        shown = "without an id" if told is None else f"as {told[:120]!r}"
        raise UpstreamInvalid("request_agrees", f"the request {request_id!r} is answered {shown}")
