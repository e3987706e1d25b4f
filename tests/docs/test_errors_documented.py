"""docs/errors.md lists every error that a client can be told, with its status and whether to try again."""

import re
from pathlib import Path

from stenograph.core import errors
from stenograph.core.errors import StenographError
from stenograph.dialects.anthropic.errors import messages_error_type
from stenograph.dialects.common.errors import error_type

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def leaves(kind: type[StenographError]) -> set[type[StenographError]]:
    below = kind.__subclasses__()
    return {kind} if not below else set().union(*map(leaves, below))


def test_every_code_is_listed_with_its_status_type_and_whether_to_retry() -> None:
    rows = {
        tuple(cell.strip(" `") for cell in line.split("|")[1:5])
        for line in PAGE.read_text().splitlines()
        if line.startswith(("| 4", "| 5"))
    }
    known = {
        (str(error.status), error.code, error_type(error), "yes" if error.retryable else "no")
        for error in leaves(errors.StenographError)
    }
    assert rows == known


def test_anthropic_s_types_are_listed_by_status() -> None:
    section = PAGE.read_text().split("## On Anthropic's routes\n")[1]
    for status in {error.status for error in leaves(errors.StenographError)}:
        kind = messages_error_type(status)
        named = {int(one) for one in re.findall(r"\b([45]\d\d)\b", section)}
        assert f"`{kind}`" in section
        assert (status in named) == (kind not in ("invalid_request_error", "api_error"))
