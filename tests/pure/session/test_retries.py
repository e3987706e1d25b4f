"""When a request repeats another: by its key, or by a retry header over the same bytes; by nothing else."""

import itertools

import pytest

from stenograph.core.errors import IdempotencyMismatch
from stenograph.session.retries import RequestIdentity, is_repeated


def one(*, key: str | None = None, is_retry: bool = False, body: bytes = b"{}", route: str = "chat") -> RequestIdentity:
    return RequestIdentity(route=route, body=body, key=key, is_retry=is_retry)


@pytest.mark.parametrize(
    ("first", "later", "repeats"),
    [
        (one(), one(), False),  # an agent that wants another reply to the same messages
        (one(), one(is_retry=True), True),
        (one(), one(is_retry=True, body=b"[]"), False),
        (one(), one(is_retry=True, route="messages"), False),
        (one(key="k"), one(key="k"), True),
        (one(key="k"), one(key="k", is_retry=True), True),
        (one(key="k"), one(key="other"), False),
        (one(key="k"), one(key="other", is_retry=True), False),  # another key is another request
        (one(), one(key="k", is_retry=True), False),
        (one(key="k"), one(), False),
        (one(key="k"), one(is_retry=True), True),  # a proxy may have dropped the key
    ],
)
def test_what_repeats_a_request(first: RequestIdentity, later: RequestIdentity, repeats: bool) -> None:
    assert is_repeated(first, later) is repeats


@pytest.mark.parametrize("later", [one(key="k", body=b"[]"), one(key="k", route="messages")])
@pytest.mark.parametrize("is_retry", [False, True])
def test_a_key_with_another_request_is_a_mistake(later: RequestIdentity, is_retry: bool) -> None:
    with pytest.raises(IdempotencyMismatch):
        is_repeated(one(key="k", is_retry=is_retry), later)


def test_whether_the_first_attempt_was_itself_a_retry_does_not_matter() -> None:
    keys, flags, bodies = (None, "k", "l"), (False, True), (b"{}", b"[]")
    for key, later_key, is_retry, body in itertools.product(keys, keys, flags, bodies):
        later = one(key=later_key, is_retry=is_retry, body=body)
        answers = []
        for was_retry in flags:
            try:
                answers.append(str(is_repeated(one(key=key, is_retry=was_retry), later)))
            except IdempotencyMismatch:
                answers.append("mismatch")
        assert answers[0] == answers[1]
