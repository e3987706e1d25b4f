"""A model as a server speaks it: fetched, loaded, its template tried, its mark."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stenograph.core.clock import Clock
from stenograph.core.day import Day
from stenograph.core.errors import InvalidRequest, StartupError
from stenograph.core.settings import Switch
from stenograph.dialects.common.template_input import check_template_kwargs
from stenograph.families.load import check_renderer, load_renderer
from stenograph.http.settings import Settings
from stenograph.model.fetch import resolve_model
from stenograph.model.files import ModelFiles, load_model_files
from stenograph.model.progress import Progress
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model as a server speaks it: loaded once, also for several processes."""

    path: Path
    files: ModelFiles
    renderer: Renderer


def load_model(settings: Settings, clock: Clock, progress: Progress, *, weights: bool) -> LoadedModel:
    """Fetch the model, if needed with its `weights`, and load it. Raises StartupError. Takes seconds, and blocks."""
    path = resolve_model(settings.model, cache_dir=settings.cache_dir, progress=progress, weights=weights)
    files = load_model_files(path)
    renderer = make_renderer(
        files,
        settings.family,
        kwargs=template_kwargs_of(settings),
        allows_special=settings.allow_special_in_text is Switch.ON,
        today=Day.of(clock.wall()),
    )
    return LoadedModel(path=path, files=files, renderer=renderer)


def make_renderer(
    files: ModelFiles,
    family_name: str,
    *,
    kwargs: Mapping[str, object] | None = None,
    allows_special: bool = False,
    today: Day | None = None,
) -> Renderer:
    """Tokenizer, template and family of a model. Raises StartupError where they do not fit, or are not append-only.

    `kwargs` are template arguments of every turn, unless it says otherwise; `today` is the date for trying the
    template: each session has its own. Says in the log why a slower library is used than could be, where it is, and the
    arguments unused by the template.
    """
    kwargs = kwargs or {}
    loaded = load_renderer(files, family_name, allows_special=allows_special, strftime_now=today)
    for note in loaded.notes:
        log.warning("%s", note)
    check_renderer(files, loaded.renderer)
    check_renderer(files, loaded.renderer, kwargs)
    for name in sorted(kwargs.keys() - loaded.renderer.writer.read_by_template(kwargs)):
        log.warning("the chat template does not use %r, which --chat-template-kwargs sets", name)
    return loaded.renderer


def template_kwargs_of(settings: Settings) -> Mapping[str, object]:
    """The server's own template arguments. Raises StartupError for one forbidden to clients too."""
    try:
        check_template_kwargs(settings.chat_template_kwargs, at="")
    except InvalidRequest as error:
        raise StartupError(f"--chat-template-kwargs: {error}") from error
    return settings.chat_template_kwargs


def model_mark(files: ModelFiles) -> ModelMark:
    """The mark of a model's tokenizer and chat template, for a session to know whether it was made with them."""
    digest = hashlib.sha256()
    for text in (files.tokenizer_json, files.chat_template or "", files.encoder_source or "", files.bos_token or ""):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(encoded) + encoded)
    return ModelMark(name=files.name, digest=digest.digest())
