"""Spells the parts of a Gemini request as JSON pointers. Pure."""

from dataclasses import dataclass

from stenograph.core.blame import Blame, RequestPart

GEMINI = "gemini"

_CONFIG = "/generationConfig"
_NAMES = {
    "top_p": "topP",
    "top_k": "topK",
    "stop": "stopSequences",
    "max_tokens": "maxOutputTokens",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "num_top_logprobs": "logprobs",
    "top_logprobs": "logprobs",
}
_POINTERS = {
    RequestPart.PROMPT: "/contents",
    RequestPart.TOOL_CHOICE: "/toolConfig/functionCallingConfig",
    RequestPart.TEMPLATE_KWARGS: f"{_CONFIG}/thinkingConfig",
    RequestPart.REPLY_OPTIONS: f"{_CONFIG}/responseLogprobs",
    RequestPart.MAX_TOKENS: f"{_CONFIG}/maxOutputTokens",
}


def config_name(name: str) -> str:
    """Google's name of a sampling parameter."""
    return _NAMES.get(name, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiSpelling:
    """The spelling of one request.

    `messages` and `tools` are the pointers of each one's origin, `grammar` that of the reply's grammar.
    `shows_thoughts`: the client asked for the reasoning. `is_sse`: its stream is of events, else it is a JSON list.
    """

    messages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    grammar: str = f"{_CONFIG}/responseSchema"
    shows_thoughts: bool = False
    is_sse: bool = True
    dialect: str = GEMINI
    id_prefix: str = "gen-"
    keeps_engine_id: bool = False

    def pointer(self, blame: Blame) -> str | None:
        """The JSON pointer of a part of the request."""
        match blame.part:
            case RequestPart.MESSAGES:
                return _at(self.messages, blame.index, "/contents")
            case RequestPart.TOOLS:
                return _at(self.tools, blame.index, "/tools")
            case RequestPart.GRAMMAR:
                return self.grammar
            case RequestPart.SAMPLING:
                return f"{_CONFIG}/{config_name(str(blame.path[0]))}"
            case part:
                return _POINTERS.get(part)


def _at(pointers: tuple[str, ...], index: int | None, whole: str) -> str:
    return whole if index is None or index >= len(pointers) else pointers[index]
