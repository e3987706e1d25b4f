"""docs/errors.md lists every error that a client can be told, with its status and whether to try again."""

from pathlib import Path

from stenograph.core import errors
from stenograph.core.errors import StenographError
from stenograph.dialects.openai.errors import error_type

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
