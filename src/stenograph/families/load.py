"""A renderer of a model's files: family, template, tokenizer, and the proof that they can be used together.

Owns the refusal of a model before a server starts. Knows nothing of servers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stenograph.core.errors import StartupError
from stenograph.families import family_for, template_source
from stenograph.model.files import ModelFiles
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.family import Family
from stenograph.text.renderer import Renderer
from stenograph.text.template.choice import ChosenTemplate, choose_template


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A renderer, and lines for the log: anything slower than it could be, and anything missing in the files."""

    renderer: Renderer
    notes: tuple[str, ...]


def load_renderer(
    files: ModelFiles,
    family_name: str = "auto",
    *,
    strftime_now: Callable[[str], str] | None = None,
    tokenizer: Tokenizer | None = None,
    allows_special: bool = False,
) -> Loaded:
    """Tokenizer, template and family of a model, whatever the proof will say of them.

    `strftime_now` gives the date in a format, to a template with the date in it. `tokenizer` is the files' own, where
    it has been made already; `allows_special` as in `Renderer`. Raises StartupError where they do not fit.
    """
    family = family_for(files, family_name)
    source = template_source(family, files)
    tokenizer = tokenizer or Tokenizer(files.tokenizer_json, sample_texts=() if source is None else (source,))
    chosen = _template(family, source, files, tokenizer, strftime_now)
    notes: list[str] = []
    if tokenizer.why_not_preferred:
        notes.append(f"text is encoded by the slower reference tokenizer: {tokenizer.why_not_preferred}")
    if chosen.why_not_preferred:
        notes.append(f"the chat template is rendered by the slower jinja2: {chosen.why_not_preferred}")
    ends = (*family.opening_stops, *((family.call_closing,) if family.call_closing else ()))
    if unsaid := [token for token in ends if tokenizer.added_tokens[token] not in files.eos_token_ids]:
        notes.append(
            f"the model's files do not say that {' or '.join(unsaid)} ends a turn (generation_config.json): an engine"
            " that goes by them goes on after it"
        )
    renderer = Renderer(tokenizer, chosen.template, family, allows_special=allows_special)
    return Loaded(renderer=renderer, notes=tuple(notes))


def check_renderer(files: ModelFiles, renderer: Renderer, kwargs: Mapping[str, object] | None = None) -> None:
    """Raise StartupError, with the first difference, where the template is not append-only with these arguments."""
    proof = renderer.prove(kwargs)
    if proof.holds:
        return
    with_kwargs = f" with chat_template_kwargs {dict(kwargs)}" if kwargs else ""
    better = None if kwargs and renderer.prove().holds else family_made_for(files, renderer.family)
    hint = f"; --family {better} is made for it" if better else ""
    raise StartupError(
        f"{files.path}: its chat template, as the family {renderer.family.name} uses it{with_kwargs}, cannot be used"
        f"{hint}: {proof.why_not}"
    )


def family_made_for(files: ModelFiles, family: Family) -> str | None:
    """The name of the family with its signs in the files, where it is another."""
    chosen = family_for(files).name
    return None if chosen == family.name else chosen


def _template(
    family: Family,
    source: str | None,
    files: ModelFiles,
    tokenizer: Tokenizer,
    strftime_now: Callable[[str], str] | None,
) -> ChosenTemplate:
    if source is None:
        assert family.encoder is not None, "a family without a template has an encoder"
        if files.encoder_source is not None and family.encoder_of_source is not None:
            return ChosenTemplate(template=family.encoder_of_source(files.encoder_source))
        return ChosenTemplate(template=family.encoder)
    return choose_template(
        source, files.bos_token, files.eos_token, tokenizer=tokenizer, family=family, strftime_now=strftime_now
    )
