"""The end of a JSON object or array in a text that still grows, for calls that no marker closes.

Knows nothing of calls.
"""


class JsonExtent:
    """Counts brackets outside of strings; of whatever text, linear in it.

    A line break ends a string: JSON has none in strings, and so a missing quote spoils no later call. The value begins
    at `start`, and `depth` of its brackets are open before; it ends before the marker `until` in any case.
    """

    def __init__(self, *, start: int = 0, depth: int = 0, until: str = "") -> None:
        self._at = start
        self._depth = depth
        self._until = until
        self._in_string = False

    def end(self, text: str) -> int | None:
        """The end of the last bracket in `text`, which continues the text of the call before; None: not closed yet."""
        until = self._until
        while self._at < len(text):
            char = text[self._at]
            if self._in_string:
                if char == "\\" and self._at + 1 == len(text):
                    return None
                self._at += 2 if char == "\\" and text[self._at + 1] != "\n" else 1
                self._in_string = char not in '"\n'
                continue
            if until and char == until[0]:
                ahead = text[self._at : self._at + len(until)]
                if until.startswith(ahead):
                    return self._at if ahead == until else None
            self._at += 1
            if char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return None
