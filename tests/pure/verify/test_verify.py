"""Whatever is wrong with how a session is opened or read, verification finds it, and tells where in ids and text."""

from array import array
from collections.abc import Mapping, Sequence

import pytest
import tokenizers

from stenograph.core.messages import Message, Tool
from stenograph.families.chatml import CHATML, SMOLLM2
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.renderer import Bridge, Renderer
from stenograph.text.template.template import ChatTemplate
from stenograph.verify.findings import Check, ConversationKind, first_difference
from stenograph.verify.verify import verify

assert SMOLLM2.template is not None
TEMPLATE = SMOLLM2.template


@pytest.fixture(scope="module")
def renderer(reference: tokenizers.Tokenizer) -> Renderer:
    return Renderer(Tokenizer(reference.to_str()), ChatTemplate(TEMPLATE, None, None), SMOLLM2)


class BrokenBridge(Renderer):
    """A renderer whose bridges are changed: of each the id number `at` is left out, of every `of_turns`-th only."""

    def __init__(self, whole: Renderer, *, at: int, of_turns: int = 1) -> None:
        super().__init__(whole.tokenizer, ChatTemplate(TEMPLATE, None, None), whole.family)
        self._at = at
        self._of_turns = of_turns
        self._num_bridges = 0

    def bridge(
        self,
        tail_ids: Sequence[int],
        reply: Message,
        new: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, object],
    ) -> Bridge:
        self._num_bridges += 1
        bridge = super().bridge(tail_ids, reply, new, tools, kwargs)
        if self._num_bridges % self._of_turns:
            return bridge
        ids: array[int] = bridge.ids[: self._at] + bridge.ids[self._at + 1 :]
        return Bridge(ids=ids, num_trimmed=bridge.num_trimmed)


def test_a_template_that_holds_is_checked_in_every_way_and_with_every_kind_of_conversation(renderer: Renderer) -> None:
    told: list[tuple[int, int]] = []
    found = verify(renderer, told=lambda done, total: told.append((done, total)))
    assert found.holds, (found.proof.why_not, found.failures[:1])
    assert (found.num_refused, found.num_tolerated) == (0, 0)
    assert {finding.check for finding in found.findings} == set(Check) - {Check.LIVE}
    for kind in ConversationKind:
        assert any(kind in finding.kinds for finding in found.findings), kind
    assert [done for done, _ in told] == list(range(told[-1][1] + 1))


def test_a_bridge_that_lacks_a_newline_is_reported_with_the_missing_id(renderer: Renderer) -> None:
    found = verify(BrokenBridge(renderer, at=0))
    assert found.proof.holds
    assert not found.holds
    first = found.failures[0]
    assert first.check is Check.BRIDGE
    difference = first.difference
    assert difference is not None
    shown = difference.at - difference.first
    assert difference.expected[shown][1] == "\n"
    assert difference.expected[:shown] == difference.actual[:shown]
    assert difference.expected[shown - 1][1] == "<|im_end|>"
    assert {finding.check for finding in found.failures} == {Check.BRIDGE, Check.BOUNDARY}


def test_a_bridge_that_is_another_the_second_time_is_found(renderer: Renderer) -> None:
    found = verify(BrokenBridge(renderer, at=1, of_turns=2))
    retried = [finding for finding in found.failures if finding.check is Check.RETRY]
    assert [finding.conversation for finding in retried] == ["a session of 24 turns"]
    assert retried[0].difference is not None


def test_an_argument_that_breaks_the_template_is_found_with_it_alone(renderer: Renderer) -> None:
    source = "{{ messages | length if forgets }}" + TEMPLATE
    broken = Renderer(renderer.tokenizer, ChatTemplate(source, None, None), renderer.family)
    assert verify(broken).holds
    found = verify(broken, {"forgets": True})
    assert not found.proof.holds
    first = found.failures[0]
    assert first.check is Check.HISTORY
    assert first.difference is not None
    assert Check.RETRY not in {finding.check for finding in found.findings}, "no session is grown with it"
    assert (first.difference.at, first.difference.expected[0][1], first.difference.actual[0][1]) == (0, "2", "1")


def test_a_template_that_ends_a_reply_with_no_token_is_reported(renderer: Renderer) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found = verify(Renderer(renderer.tokenizer, ChatTemplate(source, None, None), CHATML))
    assert found.proof.holds
    assert {finding.check for finding in found.failures} == {Check.BOUNDARY}
    assert "no control token after a reply" in found.failures[0].problem


def test_the_first_difference_is_shown_with_the_ids_around_it(renderer: Renderer) -> None:
    ids = renderer.tokenizer.encode("hello assistant")
    other = ids[:-1]
    difference = first_difference(renderer.tokenizer, expected=ids, actual=other)
    assert difference.at == len(ids) - 1
    assert [id_ for id_, _ in difference.expected] == list(ids[difference.first :])
    assert difference.expected[-1][1] == renderer.tokenizer.token_text(ids[-1])
    assert len(difference.actual) == len(difference.expected) - 1
