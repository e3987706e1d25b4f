"""The engines that an error names for images are those whose adapters may take them."""

import pytest

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.loaded import entry
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.settings import MEDIA_TAKERS, EngineKind
from stenograph.http.engine_servers import ADAPTERS


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_engine_is_named_for_media_if_its_adapter_may_take_them(kind: EngineKind) -> None:
    options = AdapterOptions(model="m", vocab_size=320, tokenizer_json=tiny_tokenizer_json())
    adapter: EngineAdapter = entry(ADAPTERS[kind])(options)
    assert bool(adapter.capabilities.media) is (kind in MEDIA_TAKERS)
