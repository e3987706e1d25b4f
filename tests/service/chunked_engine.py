"""The stand-in for SGLang, each byte of whose replies is a chunk. Run as a module, with the stand-in's own options."""

import re

from benchmarks.kit import standin

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


class ChunkedAnswers(standin.Answers):
    """The same answers."""

    def answer(self, path: bytes, body: bytes) -> list[bytes]:
        _, *pieces = super().answer(path, body)
        chunked = re.sub(rb"(?s)(.)", rb"1\r\n\1\r\n", b"".join(pieces))
        return [HEAD, chunked, b"0\r\n\r\n"]


if __name__ == "__main__":
    standin.Answers = ChunkedAnswers  # type: ignore[misc]  # the way of `main` to it
    standin.main()
