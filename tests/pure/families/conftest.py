"""Real tokenizers and chat templates, out of packages that are installed to test with; nothing is fetched here.

The light set comes with the development dependencies. The whole set (`scripts/test-families`) is for tests that are
marked `families`, and so are the archives that `scripts/families/fetch.py` has unpacked into the cache folder. Each
file is known by its hash: a package that holds another is another model.
"""

import hashlib
import importlib.util
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import transformers

from stenograph.core.messages import Message, Tool
from stenograph.families import template_source
from stenograph.families.load import load_renderer
from stenograph.model.files import ModelFiles, load_model_files
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.renderer import Renderer
from stenograph.text.template.input import message_dicts


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """Where a model's files are in a package, and the first 16 digits of the sha256 of its tokenizer and its template.

    `template_of` is a template in another package, where the one that has the tokenizer has not the model's own.
    `tokenizer_of` is the folder of the tokenizer, where the package keeps one for several models, or where a model's
    own is refused (Qwen3's 235B has a merge that makes an added token).
    """

    package: str
    folder: str
    tokenizer: str
    template: str | None
    model_type: str
    tokenizer_of: str | None = None
    template_of: str | None = None


MODELS = {
    name: RealModel(**fields)
    for path in sorted(Path(__file__).parent.glob("models/*.json"))
    for name, fields in json.loads(path.read_text()).items()
}
"""A file for each vendor."""


@dataclass(frozen=True, kw_only=True)
class Real:
    """A real model's text side, and what transformers makes of the same files."""

    files: ModelFiles
    renderer: Renderer

    def oracle(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, stock: bool = False, **kwargs: object
    ) -> str:
        """The text that transformers writes, by the family's template or, `stock`, by the model's own."""
        family = self.renderer.family
        text = _ORACLE.apply_chat_template(
            message_dicts(messages, self.renderer.writer.sealer(), family.form),
            tools=[json.loads(tool.json) for tool in tools] or None,
            chat_template=self.files.chat_template if stock else template_source(family, self.files),
            tokenize=False,
            add_generation_prompt=True,
            **{
                "bos_token": self.files.bos_token,
                "eos_token": self.files.eos_token,
                **family.fixed_kwargs,
                **kwargs,
            },
        )
        assert isinstance(text, str)
        return text


_ORACLE = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
"""It renders a template that it is given; tokenizing is held to `tokenizers` elsewhere (test_tokenizer)."""

LoadReal = Callable[..., Real]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> LoadReal:
    """Loads a model of MODELS, by the family that its files show or another; each once."""
    folders = cache(lambda name: _write_folder(MODELS[name], tmp_path_factory.mktemp(name)))

    tokenizer = cache(Tokenizer)

    @cache
    def load(name: str, family: str = "auto") -> Real:
        files = load_model_files(folders(name))
        return Real(
            files=files, renderer=load_renderer(files, family, tokenizer=tokenizer(files.tokenizer_json)).renderer
        )

    return load


def _write_folder(model: RealModel, folder: Path) -> Path:
    """The model's files as Hugging Face lays them out."""
    root = _package_root(model.package)
    tokenizer = _tokenizer_json(root / (model.tokenizer_of or model.folder))
    assert _digest(tokenizer) == model.tokenizer, f"{model.package}: another tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (root / model.folder / name).exists():
            (folder / name).write_bytes((root / model.folder / name).read_bytes())
    if model.template_of is not None:
        package, _, path = model.template_of.partition("/")
        (folder / "chat_template.jinja").write_bytes((_package_root(package) / path).read_bytes())
    config = {"vocab_size": 1 << 18, "max_position_embeddings": 1 << 15, "model_type": model.model_type}
    (folder / "config.json").write_text(json.dumps(config))
    template = load_model_files(folder).chat_template
    assert (None if template is None else _digest(template.encode())) == model.template, "another chat template"
    return folder


def _package_root(package: str) -> Path:
    """Where a package's files are: one that was fetched has its version in its name, the others are installed."""
    if "-" in package:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stenograph"
        fetched = Path(os.environ.get("STENOGRAPH_CACHE") or cache) / "families" / package
        assert fetched.is_dir(), f"there is no {fetched}: scripts/test-families fetches it"
        return fetched
    found = importlib.util.find_spec(package)  # its own code is not run
    assert found is not None, f"{package} is not installed: it comes with the extra `families`"
    assert found.origin is not None, f"{package} has no files"
    return Path(found.origin).parent


def _tokenizer_json(folder: Path) -> bytes:
    packed = folder / "tokenizer.json.zip"
    if not packed.exists():
        return (folder / "tokenizer.json").read_bytes()
    with zipfile.ZipFile(packed) as archive:
        return archive.read(archive.namelist()[0])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
