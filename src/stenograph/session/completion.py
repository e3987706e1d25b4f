"""Completions: a prompt is matched by its ids and goes to the engine as it is; several go side by side."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Sequence

import numpy as np
from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import Asked, CompletionRequest, ToolChoice
from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.types import Grammar, Prompt, RequestId, SamplingParams
from stenograph.engine.base import Capabilities
from stenograph.model.tokenizer import Span
from stenograph.session.prompt_builder import Tokenization, json_of, num_kept_of, truncated
from stenograph.session.services import TurnServices
from stenograph.session.steps import RunningTurn
from stenograph.text.grammar.held import BeforeAnswer
from stenograph.text.reading import Parser
from stenograph.text.reply_text import PlainParser
from stenograph.trajectory.history import Attachment
from stenograph.trajectory.strand import Leases, Strand
from stenograph.trajectory.turn import PromptContext


class CompletionPromptBuilder:
    """The continuation of one prompt of a request."""

    asked = Asked.COMPLETION
    rewrites: tuple[AppliedRewrite, ...] = ()
    tool_choice = ToolChoice()
    parallel_tool_calls = True
    context = PromptContext()

    def __init__(
        self,
        request: CompletionRequest,
        index: int,
        *,
        leases: Leases,
        services: TurnServices,
        capabilities: Capabilities,
    ) -> None:
        self.tokenization: Tokenization | None = None
        if services.tokenizer is not None:
            self.tokenization = Tokenization(services.tokenizer, services.clock)
        self.prompt_blame = Blame(RequestPart.PROMPT, index)
        self._request = request
        self._prompt = request.prompts[index]
        self._leases = leases
        self._services = services
        self._renderer = services.renderer
        self._capabilities = capabilities
        self._ids: array[int] | None = None
        self._strand: Strand | None = None

    @property
    def strand(self) -> Strand:
        assert self._strand is not None, "a turn is positioned first"
        return self._strand

    async def position(self) -> Attachment:
        """Make ids of the prompt, and match them."""
        request = self._request
        num_kept = num_kept_of(request.truncation, request.params, self._capabilities, self._services.over_budget)
        ids = truncated(await self._all_ids(), self._request.truncation, num_kept)
        if not ids:
            raise InvalidRequest("The prompt is empty: it must have at least one token.", blame=self.prompt_blame)
        self._ids = ids
        self._strand = self._leases.of_ids(ids)
        return self._strand.history.position_ids(ids)

    async def render(self, attachment: Attachment) -> Prompt:
        """The ids as they are."""
        assert self._ids is not None, "a turn is positioned before it is rendered"
        ids, parent = self._ids, attachment.parent
        if parent is not None and parent.media:
            raise InvalidRequest(
                "The prompt goes on with a line of images, and ids bring none: go on with it as a chat.",
                blame=self.prompt_blame,
            )
        prompt, at_hand = Prompt.of(ids, num_kept=parent.num_tokens if parent else 0), self.strand.line.text_of(parent)
        if not self._capabilities.takes_json:
            return prompt
        fragments = await json_of(self._services.share, at_hand, prompt.of_kept, prompt.new_ids)
        return replace(prompt, json_fragments=fragments)

    async def forced_grammar(self, prompt: Prompt) -> Grammar | None:
        return None

    def before_answer(self, prompt: Prompt) -> BeforeAnswer | None:
        return None

    def parser(self, params: SamplingParams, request_id: RequestId, prompt: Prompt) -> Parser:
        request = self._request
        return PlainParser(
            self._renderer.tokenizer,
            stop=params.stop,
            view=request.text,
            min_tokens=params.min_tokens,
        )

    async def _all_ids(self) -> "array[int]":
        """The prompt's ids before any is left out. Raises InvalidRequest for one unknown to the model."""
        prompt = self._prompt
        if isinstance(prompt, str):
            tokenizer = self._renderer.tokenizer
            try:
                if self.tokenization is not None:
                    return await self.tokenization.ids((Span(text=prompt, trusted=True),))
                return await self._services.pool.run(lambda: tokenizer.encode(prompt), num_bytes=len(prompt))
            except UnrenderableMessage as error:
                error.blame = self.prompt_blame
                raise
        vocab_size = self._capabilities.vocab_size
        found = np.frombuffer(prompt, dtype=np.int32)
        if len(found) and not 0 <= found.min() <= found.max() < vocab_size:
            at = int(((found < 0) | (found >= vocab_size)).argmax())
            raise InvalidRequest(
                f"{prompt[at]} is not a token id: the vocabulary has {vocab_size} ids.",
                blame=Blame(self.prompt_blame.part, self.prompt_blame.index, (at,)),
            )
        return prompt


def completions(
    request: CompletionRequest, *, leases: Leases, services: TurnServices, capabilities: Capabilities
) -> list[CompletionPromptBuilder]:
    """The builder of each prompt. A turn takes its lease when its ids are known."""
    return [
        CompletionPromptBuilder(request, index, leases=leases, services=services, capabilities=capabilities)
        for index in range(len(request.prompts))
    ]


class SideBySide:
    """The steps of several turns: each is taken of all at once, before the next."""

    def __init__(self, turns: Sequence[RunningTurn]) -> None:
        self._turns = turns

    def __repr__(self) -> str:
        return f"<SideBySide {len(self._turns)} turns>"

    async def position(self) -> None:
        await self._each(RunningTurn.position)

    async def render(self) -> None:
        await self._each(RunningTurn.render)

    async def sample(self) -> None:
        await self._each(RunningTurn.sample)

    async def _each(self, step: Callable[[RunningTurn], Coroutine[None, None, None]]) -> None:
        """Take a step. The first failure of a turn stops the others, and its error is raised."""
        failed: list[Exception] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for turn in self._turns:
                    tasks.create_task(step(turn), name=f"turn-{turn.request_id}")
        except* Exception as group:  # noqa: BLE001 -- raised again, the first of them
            failed += group.exceptions
        if failed:
            raise failed[0]
