"""A prompt with media: which medium stands at which of its logical ids. Loaded by turns with media alone.

Knows neither how an engine takes media nor where their bytes are kept.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest
from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.messages import MediaItem, MediaRef
from stenograph.core.types import Prompt, PromptMedia
from stenograph.engine.base import Capabilities
from stenograph.engine.settings import MEDIA_TAKERS
from stenograph.text.renderer import Renderer
from stenograph.trajectory.history import Attachment


def with_media(
    prompt: Prompt, attachment: Attachment, request: ChatRequest, renderer: Renderer, capabilities: Capabilities
) -> Prompt:
    """The prompt with the media of its line, and of its new messages at the placeholders written for them.

    Raises InvalidRequest: the engine takes none. Raises UnrenderableMessage: the model or its template has no place for
    one.
    """
    new = [one.ref for message in attachment.new_messages for one in message.media]
    before = () if attachment.parent is None else attachment.parent.media
    places = _places(prompt, renderer, len(before), len(new))
    for kind in {ref.kind for ref in (*new, *(one.ref for one in before))} - capabilities.media:
        raise InvalidRequest(
            f"The engine {capabilities.engine} cannot be given an {kind.value} with exact ids here;"
            f" {' and '.join(MEDIA_TAKERS)} can.",
            blame=Blame(RequestPart.MESSAGES),
        )
    if capabilities.places_media_by_text:
        _check_text(prompt, renderer, len(before) + len(new), capabilities)
    contents = {item.ref.sha256: item.base64 for item in request.media}

    def item(ref: MediaRef) -> MediaItem:
        return MediaItem(ref=ref, base64=contents[ref.sha256])  # equal bytes may have another type in each message

    media = [
        *(PromptMedia(position=one.position, item=item(one.ref), recorded=one.ids) for one in before),
        *(PromptMedia(position=at, item=item(ref)) for at, ref in zip(places, new, strict=True)),
    ]
    return replace(prompt, media=tuple(media))


def _places(prompt: Prompt, renderer: Renderer, num_before: int, num_new: int) -> list[int]:
    """The positions of the placeholders in the new ids. Raises UnrenderableMessage: there are not as many as media."""
    if not num_new:
        return []
    family = renderer.family
    if family.image_placeholder is None:
        raise UnrenderableMessage(
            f"Images cannot be shown to a model of the family {family.name}.", blame=Blame(RequestPart.MESSAGES)
        )
    placeholder = renderer.tokenizer.added_tokens[family.image_placeholder]
    places = list(_found(prompt, placeholder))
    if len(places) != num_new:
        raise UnrenderableMessage(
            f"The model's chat template writes {len(places)} {family.image_placeholder} for {num_new} images.",
            blame=Blame(RequestPart.MESSAGES),
        )
    if prompt.ids.count(placeholder) != num_before + num_new:
        raise UnrenderableMessage(
            f"The model has sampled {family.image_placeholder} in this conversation: an engine would take it for a"
            " later image's place. Leave the reply out to generate it again.",
            blame=Blame(RequestPart.MESSAGES),
        )
    return places


def _check_text(prompt: Prompt, renderer: Renderer, num_media: int, capabilities: Capabilities) -> None:
    """Raise InvalidRequest where the prompt's text has more placeholders than media: SGLang 0.5.23 never answers it."""
    placeholder = renderer.family.image_placeholder
    assert placeholder is not None, "a line has media of a family with a placeholder"
    if renderer.tokenizer.decode(prompt.ids).count(placeholder) != num_media:
        raise InvalidRequest(
            f"This conversation has images, and {placeholder} spelled in a text: the engine {capabilities.engine} would"
            " take it for an image's place. Leave it out; vllm takes it.",
            blame=Blame(RequestPart.MESSAGES),
        )


def _found(prompt: Prompt, placeholder: int) -> Iterator[int]:
    for index, id_ in enumerate(prompt.new_ids, prompt.num_kept):
        if id_ == placeholder:
            yield index
