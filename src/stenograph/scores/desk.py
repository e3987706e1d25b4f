"""Scores of one session: what is to be scored, by which engine, and the annotation of the results.

At most `in_flight` sessions are scored at an engine at once, so that turns there have the rest of it; the embedded
engine puts every turn before all of them.
"""

import asyncio
import uuid
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from stenograph.core.chat import Asked
from stenograph.core.errors import EngineUnavailable, InvalidRequest
from stenograph.core.kinds import TRAINED_KINDS
from stenograph.core.loaded import entry
from stenograph.core.messages import Message, Role
from stenograph.core.outcome import Annotation
from stenograph.core.types import RequestId
from stenograph.core.weights import UNNAMED
from stenograph.engine.base import Engine, EngineState
from stenograph.engine.scoring import ScoreRequest, Scores
from stenograph.export.lines import SampleLine, whole_line
from stenograph.scores.passes import ScorePass, digest_of, scores_of_turns, token_passes, turn_passes, with_prompt
from stenograph.scores.requests import ScoreRequestBody, messages_of
from stenograph.session.facts import session_facts
from stenograph.session.prompt_builder import TAIL_TOKENS
from stenograph.session.said import annotate
from stenograph.session.services import TurnServices
from stenograph.session.session import Session
from stenograph.session.sessions import Sessions
from stenograph.session.weights import Weights
from stenograph.trajectory.strand_facts import SessionFacts, leaves_of

if TYPE_CHECKING:
    from stenograph.session.policies import LoraWeights

T = TypeVar("T")

MAX_ANNOTATIONS = 64
"""Most annotations of a session: they are in memory with it."""
_BYTES_PER_TOKEN = 8
"""The approximate cost of a token; only decides whether work is small enough for the loop."""


class ScoreDesk:
    """Scores sessions of one server."""

    def __init__(self, services: TurnServices, sessions: Sessions, *, in_flight: int) -> None:
        self._services = services
        self._sessions = sessions
        self.in_flight = in_flight
        self._id = uuid.uuid4().hex
        self._places = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(in_flight))

    def __repr__(self) -> str:
        return f"<ScoreDesk of {sorted(self._places)}>"

    async def score(self, session: Session, wire: ScoreRequestBody) -> tuple[Annotation, bool]:
        """Score a session's tokens and keep the annotation; True where it was there already: the same tokens by the
        same weights. Weights without a name are the same in this process alone, until some change. Raises
        InvalidRequest, EngineUnavailable, UpstreamError, SamplesInconsistent, and as `annotate` does."""
        engine = self._engine(wire.engine, wire.policy)
        passes = await self._passes(session_facts(session), wire)
        if wire.name not in session.annotations and len(session.annotations) >= MAX_ANNOTATIONS:
            raise InvalidRequest(f"The session has {MAX_ANNOTATIONS} annotations, the most: reuse a name of theirs.")
        self._sessions.capacity.check(0)  # scores are held as tokens are
        known, weights = session.annotations.get(wire.name), self._weights(engine, wire.policy)
        num_changes, version = weights.num_changes, await engine.find_version()
        if known is not None and known.digest == digest_of(passes, self._facts(engine, wire, version)):
            return known, True
        results = await self._scored(engine, passes, wire)
        versions = {scores.version for scores in results}
        if len(versions) > 1 or weights.is_changing or weights.num_changes != num_changes:
            raise EngineUnavailable("Other weights came while the session was scored: ask again.", retry_after_s=1.0)
        version = versions.pop() or version
        annotation = Annotation(
            name=wire.name,
            digest=digest_of(passes, self._facts(engine, wire, version)),
            engine=engine.capabilities.engine,
            policy=wire.policy,
            version=version if weights is self._services.weights else weights.version,
            at=self._services.clock.wall(),
            turns=scores_of_turns(passes, results),
            tokens={one.token: scores.logprobs[0] for one, scores in zip(passes, results, strict=True) if one.token},
        )
        await annotate(self._sessions, session.id, annotation)
        return annotation, False

    async def _scored(self, engine: Engine, passes: Sequence[ScorePass], wire: ScoreRequestBody) -> list[Scores]:
        """The results of the passes, one after the other: each finds what is cached of the one before."""
        results: list[Scores] = []
        async with self._places[engine.name]:
            for one in passes:
                request = ScoreRequest(
                    request_id=RequestId(f"scores-{uuid.uuid4().hex}"),
                    ids=one.ids,
                    start=one.start,
                    num_top=wire.top_k or 0,
                    policy=wire.policy,
                )
                results.append(await engine.score(request))
        return results

    def _weights(self, engine: Engine, policy: str | None) -> Weights:
        """The weights of a score: a LoRA's where the engine lists one of this name; it may be the name of a model."""
        is_lora = policy is not None and policy in (engine.capabilities.policies or ())
        model = self._services.weights
        return entry("stenograph.session.policies:compared")(model, policy) if is_lora else model

    def _engine(self, name: str | None, policy: str | None) -> Engine:
        """The engine of this name, or the ready one with least to do, of those that list the LoRA if any does. Raises
        InvalidRequest, EngineUnavailable."""
        members = self._services.engine.members
        if name is not None and name not in members:
            raise InvalidRequest(f"engine is one of {', '.join(sorted(members))}, got {name[:200]!r}.", param="/engine")
        able = [one for one in members.values() if one.health().state is EngineState.READY]
        if name is not None:
            return members[name]
        if not able:
            raise EngineUnavailable("No engine is ready to score tokens.", retry_after_s=1.0)
        listing = [one for one in able if policy is not None and policy in (one.capabilities.policies or ())]
        return min(listing or able, key=lambda one: one.num_running)

    async def _passes(self, facts: SessionFacts, wire: ScoreRequestBody) -> list[ScorePass]:
        lines = self._lines(facts, wire)
        num_bytes = _BYTES_PER_TOKEN * sum(len(line.ids) for line in lines)
        prompts = await self._on_pool(lambda: [self._prompt(line, wire) for line in lines], num_bytes)
        if wire.tokens is None:
            return await self._on_pool(lambda: turn_passes(lines, prompts), num_bytes)
        tokens = {text: self._token(text, index) for index, text in enumerate(wire.tokens)}
        before = await self._on_pool(partial(self._before, lines[0], prompts[0], wire), num_bytes)
        return token_passes(before, tokens)

    async def _on_pool(self, work: Callable[[], T], num_bytes: int) -> T:
        return await self._services.pool.run(work, num_bytes=num_bytes)

    def _lines(self, facts: SessionFacts, wire: ScoreRequestBody) -> list[SampleLine]:
        """The lines to score, the newest alone where tokens are named. Raises InvalidRequest where there is none."""
        if wire.strand is not None and wire.strand >= len(facts.strands):
            raise InvalidRequest(f"strand must be below {len(facts.strands)}, got {wire.strand}.", param="/strand")
        chosen = [
            strand
            for strand in facts.strands
            if (strand.kind in TRAINED_KINDS if wire.strand is None else strand.number == wire.strand)
        ]
        if wire.tokens is not None:
            ends = [facts.latest if wire.strand is None else chosen[0].latest]
        else:
            nodes = [node for strand in chosen for node in strand.nodes]
            nodes.sort(key=lambda node: node.id)
            ends = [*leaves_of(nodes, facts.options.history)]
        most = self._services.renderer.max_trim_tokens
        lines = [whole_line(end, max_trim_tokens=most) for end in ends if end is not None]
        if not any(part.num_sampled for line in lines for part in line.parts):
            raise InvalidRequest("There is no turn with sampled tokens to score.", param="/strand")
        if any(line.leaf.media for line in lines):  # their effective ids say nothing to a model without the pictures
            raise InvalidRequest("Lines with images are not scored: a pass over ids alone would not show them.")
        return lines

    def _prompt(self, line: SampleLine, wire: ScoreRequestBody) -> "array[int] | None":
        """The ids of another prompt. Raises UnrenderableMessage."""
        renderer, context = self._services.renderer, line.parts[0].node.turn.context
        if wire.prompt is None or isinstance(wire.prompt, str):
            return None if wire.prompt is None else renderer.tokenizer.encode(wire.prompt)
        messages = messages_of(wire.prompt)
        renderer.check_messages(messages, context.tools)
        return renderer.render(messages, context.tools, context.arguments)

    def _before(self, line: SampleLine, prompt: "array[int] | None", wire: ScoreRequestBody) -> "array[int]":
        """The ids before the named tokens. Raises InvalidRequest, UnrenderableMessage."""
        ids, shift = with_prompt(line, prompt)
        least = 1 if prompt is None else line.parts[0].num_prompt
        if wire.position is not None:
            if not least <= wire.position <= len(line.ids):
                raise InvalidRequest(
                    f"position must be from {least} to {len(line.ids)}, got {wire.position}.", param="/position"
                )
            return ids[: wire.position + shift]
        if wire.question is None:
            return ids
        turn = line.leaf.turn
        if turn.asked is Asked.COMPLETION:
            raise InvalidRequest("A question follows a chat, and this line is a completion's.", param="/question")
        question = Message(role=Role.USER, content=wire.question)
        bridge = self._services.renderer.bridge(
            ids[-TAIL_TOKENS:], turn.reply.message, [question], turn.context.tools, turn.context.arguments
        )
        return ids[: len(ids) - bridge.num_trimmed] + bridge.ids

    def _token(self, text: str, index: int) -> int:
        """The id of a named token. Raises InvalidRequest where its text is none or several."""
        ids = self._services.renderer.tokenizer.encode(text)
        if len(ids) != 1:
            raise InvalidRequest(
                f"A named token is one token of this model, and {text!r} is {len(ids)}: spell it otherwise.",
                param=f"/tokens/{index}",
            )
        return ids[0]

    def _facts(self, engine: Engine, wire: ScoreRequestBody, version: str | None) -> Mapping[str, object]:
        """The facts beside ids that scores depend on."""
        weights, of_lora = self._services.weights, self._weights(engine, wire.policy)
        name = weights.version if version in (None, UNNAMED) else version
        facts: dict[str, object] = {
            "engine": wire.engine,
            "model": engine.capabilities.model,
            "policy": wire.policy,
            "weights": name or [self._id, weights.num_changes],
            "top_k": wire.top_k,
        }
        if of_lora is not weights:
            facts["lora"] = [(engine.capabilities.policies or {}).get(wire.policy or ""), self._lora_name(of_lora)]
        return facts

    def _lora_name(self, weights: Weights) -> object:
        """The name of a LoRA's last load; of one loaded by another way, its changes in this process."""
        return cast("LoraWeights", weights).loaded or [self._id, weights.num_changes]
