"""Settings: file < environment < flag, and a mistake stops the start in one line that names it."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stenograph import parts
from stenograph.cli.settings_table import SETTINGS, CommandSettings, kubernetes_variables, load_settings
from stenograph.core.errors import StartupError
from stenograph.dialects.settings import UnknownFields
from stenograph.engine.settings import EngineKind
from stenograph.http.settings import Settings
from stenograph.parts import EmbeddedSettings, settings_of


def toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "stenograph.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_nothing_given_gives_the_defaults():
    loaded = load_settings({}, {"HOME": "/root", "PATH": "/bin", "XDG_CACHE_HOME": "/x"}, None)
    assert loaded == CommandSettings(cache_dir=Path("/x/stenograph"))
    assert (loaded.host, loaded.port, loaded.model) == ("127.0.0.1", 8080, "smollm2-135m")
    assert (loaded.engine, loaded.unknown_fields) == (EngineKind.EMBEDDED, UnknownFields.REFUSE)


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path):
    file = toml(tmp_path, "port = 1\nmax_batch = 1\nkv_tokens = 100\n")
    environ = {"STENOGRAPH_PORT": "2", "STENOGRAPH_MAX_BATCH": "2"}
    loaded = load_settings({"port": "3", "max_batch": None}, environ, file)
    assert (loaded.port, loaded.max_batch, loaded.kv_tokens) == (3, 2, 100)


def test_every_setting_can_be_given_under_each_of_its_names(tmp_path: Path):
    texts = {
        "host": "::1", "port": "0", "workers": "2", "exit_with": "1", "model": "m.gguf", "family": "chatml",
        "chat_template_kwargs": '{"thinks": [false, 1.5]}', "allow_special_in_text": "on", "engine": "sglang",
        "engine_url": "http://127.0.0.1:1", "engine_api_key": "e-1", "engine_keys": "keys.toml",
        "connect_timeout": "0.5", "engine_load_interval": "0.5", "engine_wait": "30", "max_reply_bytes": "4096",
        "engine_logprobs": "raw", "weight_version": "w-1", "weights_dir": "w", "scores_in_flight": "2",
        "token_price": "0.6",
        "replay": "all", "reply": "lean",
        "engine_threads": "2", "max_batch": "3", "kv_tokens": "4096", "step_tokens": "64",
        "prefix_reuse": "on", "forward": "numpy", "torch_device": "auto",
        "torch_dtype": "float32", "tokenize_workers": "0",
        "cpu_workers": "5", "body_slots": "3", "loop_watchdog": "on", "history": "tree",
        "compat": "miles", "after_length": "refuse",
        "matcher": "strict", "sampling": "rules.json", "side_rules": "side.toml",
        "canonical": "cc-date", "support": "on", "cache_salt": "pin",
        "require_logprobs": "tempered",
        "data_dir": "data", "durability": "interval", "play": "", "play_ignores": "", "strict": "",
        "store": "", "advertise_url": "", "lease": "",
        "max_media_bytes": "12", "max_media_items": "10",
        "max_sessions": "6", "max_in_flight": "7", "max_held_tokens": "9", "max_nodes": "8",
        "max_strands": "11", "max_staleness": "2", "session_ttl": "60",
        "max_body_bytes": "8192", "header_timeout": "2.5", "body_timeout": "7.5",
        "request_timeout": "1.5", "abort_grace": "0.5", "drain_timeout": "2.5",
        "dialects": "gemini", "unknown_fields": "record", "over_budget": "clamp", "proxy_allow": "v1/models",
        "fetch_media": "pictures.example", "api_key": "one", "admin_key": "two",
        "tenants": "tenants.toml", "audit_log": "audit.jsonl",
        "allow_host": "box.local", "allow_origin": "https://ui.example:8443",
        "log_level": "debug", "log_format": "json", "otlp_endpoint": "http://collector:4318", "cache_dir": "/c",
    }  # fmt: skip
    assert list(texts) == [setting.name for setting in SETTINGS]
    assert _from_all_sources(texts, tmp_path).request_timeout_s == 1.5
    shared = {"store": "postgresql://me:hidden@db/x", "advertise_url": "http://10.0.0.5:80", "lease": "2.5"}
    kept = {"data_dir": "", "workers": "1", "durability": "commit"}
    loaded = _from_all_sources({**texts, **shared, **kept}, tmp_path)
    assert loaded.cache_dir == Path("/c")
    assert loaded.lease_s == 2.5
    assert "hidden" not in repr(loaded)


def _from_all_sources(texts: dict[str, str], tmp_path: Path) -> CommandSettings:
    """The settings of these texts, those that are empty left out: the same from flags, environment and file."""
    texts = {name: text for name, text in texts.items() if text}
    typed = {
        name: "{thinks = [false, 1.5]}"
        if name == "chat_template_kwargs"
        else f'["{text}"]'
        if name
        in (
            "dialects",
            "api_key",
            "admin_key",
            "proxy_allow",
            "engine_url",
            "allow_host",
            "allow_origin",
            "fetch_media",
        )
        else text
        if text[0].isdigit()
        else f'"{text}"'
        for name, text in texts.items()
    }
    from_flags = load_settings(texts, {}, None)
    from_environ = load_settings(
        {}, {setting.env: texts[setting.name] for setting in SETTINGS if setting.name in texts}, None
    )
    from_file = load_settings({}, {}, toml(tmp_path, "\n".join(f"{name} = {text}" for name, text in typed.items())))
    assert from_flags == from_environ == from_file
    return from_flags


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"store": "mysql://db/x"}, "expected an address like postgresql"),
        ({"store": "postgresql://db/x", "data_dir": "d"}, "are both set"),
        ({"store": "postgresql://db/x", "durability": "interval"}, "keeps turns as commit does"),
        ({"store": "postgresql://db/x", "lease": "0.1"}, "must be at least 0.3 s"),
        ({"store": "postgresql://db/x", "host": "0.0.0.0"}, "give --advertise-url"),
        ({"advertise_url": "http://10.0.0.5:80"}, "give --store, too"),
        ({"lease": "2"}, "give --store, too"),
        *(
            (
                {"store": "postgresql://db/x", "advertise_url": url},
                f"bad value '{re.escape(url)}' for --advertise-url.*8080",
            )
            for url in ("http://10.0.0.5/x", "http://[x", "http://[x]", "http://a:99999", "http://a:b", "http://:80")
        ),
    ],
)
def test_settings_of_a_shared_database_fit_each_other(given: dict[str, str], said: str):
    with pytest.raises(StartupError, match=said):
        load_settings(given, {}, None)


@pytest.mark.parametrize("value", ["""'{"thinks": false}'""", "{on = 2020-01-01}", "{x = nan}", "[1]"])
def test_template_arguments_are_a_table_of_what_json_can_say(tmp_path: Path, value: str):
    with pytest.raises(StartupError, match=r"bad value .* for chat_template_kwargs in the file .*a JSON object"):
        load_settings({}, {}, toml(tmp_path, f"chat_template_kwargs = {value}"))


def test_api_keys_are_a_list_of_their_own_in_each_source(tmp_path: Path):
    assert load_settings({"api_key": ["a", "b", "a"]}, {}, None).api_key == ("a", "b")
    assert load_settings({}, {"STENOGRAPH_API_KEY": "a,b"}, None).api_key == ("a", "b")
    assert load_settings({}, {}, toml(tmp_path, 'api_key = ["a", "b"]')).api_key == ("a", "b")


def test_an_api_key_is_shown_in_no_message_and_no_repr():
    assert "hidden" not in repr(load_settings({"api_key": ["hidden"]}, {}, None))
    with pytest.raises(StartupError, match="bad value") as raised:
        load_settings({}, {"STENOGRAPH_API_KEY": "hidden key"}, None)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "65536"), ("port", "-1"), ("port", "1e3"), ("port", "٣"), ("port", ""), ("port", " 8080"),
        ("host", ""), ("host", "  "), ("host", "a\nb"), ("engine", "tgi"), ("engine", "Embedded"), ("max_batch", "0"),
        ("request_timeout", "0"), ("request_timeout", "nan"), ("request_timeout", "inf"), ("api_key", "a,,b"),
        ("api_key", ""), ("cache_dir", "~no-such-user-here/x"), ("unknown_fields", "drop"), ("log_level", "10"),
        ("dialects", ""), ("dialects", "openai,cohere"),
        ("forward", "jax"), ("torch_device", "gpu"), ("torch_device", "cuda:"),
        ("torch_dtype", "float16"), ("chat_template_kwargs", "[]"), ("chat_template_kwargs", "{"),
        ("chat_template_kwargs", '{"a": NaN}'), ("chat_template_kwargs", '{"a":' * 100_000),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_its_key_and_its_source(name: str, text: str):
    with pytest.raises(
        StartupError, match=f"bad value .* for --{name.replace('_', '-')} on the command line: expected"
    ):
        load_settings({name: text}, {}, None)


def test_a_bad_value_of_a_flag_that_may_be_repeated_is_shown_as_it_was_typed() -> None:
    with pytest.raises(StartupError, match=r"^bad value 'b/c', 'd e' for --allow-host on the command line: "):
        load_settings({"allow_host": ["b/c", "d e"]}, {}, None)


@pytest.mark.parametrize("value", ["true", "8080.0", '"8080"', "[1]", "{}", "70000", "2020-01-01"])
def test_a_value_of_another_toml_type_is_refused(tmp_path: Path, value: str):
    with pytest.raises(StartupError, match=r"bad value .* for port in the file .*stenograph\.toml"):
        load_settings({}, {}, toml(tmp_path, f"port = {value}"))


def test_unknown_keys_are_refused_in_every_source(tmp_path: Path):
    with pytest.raises(StartupError, match="unknown setting 'prot' in the file"):
        load_settings({}, {}, toml(tmp_path, "prot = 1"))
    with pytest.raises(
        StartupError, match=r"unknown setting 'STENOGRAPH_PROT' in the environment; did you mean STENOGRAPH_PORT\?"
    ):
        load_settings({}, {"STENOGRAPH_PROT": "1"}, None)
    with pytest.raises(StartupError, match="unknown setting 'prot' on the command line"):
        load_settings({"prot": "1"}, {}, None)


@pytest.mark.parametrize("name", ["LETTERS", "LOG", "SHOP"])
def test_an_unknown_name_that_is_no_slip_of_a_known_one_gets_no_hint(tmp_path: Path, name: str):
    with pytest.raises(StartupError, match=f"unknown setting 'STENOGRAPH_{name}' in the environment; docs/settings.md"):
        load_settings({}, {f"STENOGRAPH_{name}": "1"}, None)
    with pytest.raises(StartupError, match=rf"unknown setting '{name.lower()}' in the file .*; docs/settings\.md"):
        load_settings({}, {}, toml(tmp_path, f"{name.lower()} = 1"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MAXBATCH", "MAX_BATCH"), ("max_batch", "MAX_BATCH"), ("MAX_SESSION", "MAX_SESSIONS"), ("MODLE", "MODEL"),
        ("CACHE_DIR", "CACHE"), ("REQUEST_TIMEOUTS", "REQUEST_TIMEOUT"),
    ],
)  # fmt: skip
def test_a_slip_of_the_pen_in_a_setting_gets_a_hint(name: str, meant: str):
    with pytest.raises(StartupError, match=rf"did you mean STENOGRAPH_{meant}\? docs"):
        load_settings({}, {f"STENOGRAPH_{name}": "1"}, None)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(StartupError, match=r"cannot read the file .*none\.toml.*No such file"):
        load_settings({}, {}, tmp_path / "none.toml")
    with pytest.raises(StartupError, match="is not TOML"):
        load_settings({}, {}, toml(tmp_path, "port = "))


def settings_or_message(load: Callable[[], CommandSettings]) -> CommandSettings | str:
    try:
        return load()
    except StartupError as error:
        return str(error)


VALUES = st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.text()))
NAMES = st.one_of(st.sampled_from([setting.name for setting in SETTINGS]), st.text())


@given(flags=st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_flags_give_settings_or_one_line(flags: dict[str, object]):
    loaded = settings_or_message(lambda: load_settings(flags, {}, None))
    if isinstance(loaded, str):
        assert loaded.isprintable()
    else:
        rows = {setting.name: setting for setting in SETTINGS}
        given = {name: value for name, value in flags.items() if value is not None}
        assert all(getattr(loaded, rows[n].field) == rows[n].kind.read(value) for n, value in given.items())


@given(text=st.text(st.characters(exclude_categories=["Cs"]).filter(lambda character: character != "\0")))
@example(text="\r")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_gives_settings_or_one_line(tmp_path: Path, text: str):
    file = toml(tmp_path, text)
    loaded = settings_or_message(lambda: load_settings({}, {}, file))
    if isinstance(loaded, str):
        assert "\n" not in loaded
    else:
        assert set(tomllib.loads(text)) <= {setting.name for setting in SETTINGS}


@given(name=st.sampled_from([setting.name for setting in SETTINGS]), value=st.one_of(st.integers(), st.text()))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_environment_reads_text_as_the_command_line_does(name: str, value: object):
    env = {setting.name: setting.env for setting in SETTINGS}[name]
    outcomes: list[object] = []
    for flags, environ in (({name: str(value)}, {}), ({}, {env: str(value)})):
        try:
            outcomes.append(load_settings(flags, environ, None))
        except StartupError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine": "sglang"}, "--engine sglang needs the address of its server: give --engine-url"),
        ({"engine_url": "http://x"}, "--engine-url is set, but --engine is embedded"),
        ({"replay": "all"}, "--replay is all, but the embedded engine"),
        ({"engine_api_key": "k"}, "--engine-api-key is set, but the embedded engine takes no key"),
        ({"engine_keys": "k"}, "--engine-keys is set, but the embedded engine takes no key"),
        ({"engine": "vllm", "engine_url": "http://a", "replay": "all"}, "vLLM reports routed_experts alone"),
        ({"engine": "vllm", "engine_url": "http://a", "reply": "lean"}, "vLLM writes no replies here"),
        ({"reply": "lean"}, "--reply is lean, but the embedded engine"),
        ({"engine": "vllm", "engine_url": "http://a", "forward": "torch"}, "only the embedded one has it"),
        ({"engine": "vllm", "engine_url": "http://a", "tokenize_workers": "2"}, "only the embedded one has them"),
        ({"torch_device": "cpu"}, "--torch-device is cpu, but --forward is numpy: set --forward torch"),
        ({"torch_dtype": "bfloat16"}, "--torch-dtype is bfloat16, but --forward is numpy: set --forward torch"),
        ({"engine": "llamacpp", "engine_url": "http://a", "replay": "all"}, "llama.cpp does not report its experts"),
        ({"engine": "llamacpp", "engine_url": "http://a", "reply": "lean"}, "llama.cpp writes no replies here"),
        (
            {"engine": "llamacpp", "engine_url": "http://a", "support": "on"},
            "but llamacpp does not report",
        ),
        (
            {"engine": "lmdeploy", "engine_url": "http://a", "support": "on"},
            "but lmdeploy does not report",
        ),
        ({"cache_salt": "pin"}, "--cache-salt is pin, but embedded cannot keep a cache of the weights"),
        ({"engine": "llamacpp", "engine_url": "http://a", "cache_salt": "pin"}, "but llamacpp cannot keep a cache"),
        ({"engine": "lmdeploy", "engine_url": "http://a", "cache_salt": "pin"}, "but lmdeploy cannot keep a cache"),
        ({"engine": "sglang-generate", "engine_url": "http://x", "reply": "lean"}, "own route writes no replies"),
        ({"engine": "lmdeploy", "engine_url": "http://x", "reply": "lean"}, "LMDeploy writes no replies"),
        ({"engine": "lmdeploy", "engine_url": "http://x", "replay": "all"}, "LMDeploy reports routed_experts alone"),
    ],
)
def test_settings_that_do_not_fit_each_other_stop_the_start(flags: dict[str, object], message: str):
    with pytest.raises(StartupError, match=message):
        load_settings(flags, {}, None)


OF_A_SERVICE = {
    "STENOGRAPH_SERVICE_HOST": "10.0.0.11", "STENOGRAPH_SERVICE_PORT": "8080", "STENOGRAPH_SERVICE_PORT_HTTP": "8080",
    "STENOGRAPH_PORT": "tcp://10.0.0.11:8080", "STENOGRAPH_PORT_8080_TCP": "tcp://10.0.0.11:8080",
    "STENOGRAPH_PORT_8080_TCP_PROTO": "tcp", "STENOGRAPH_PORT_8080_TCP_PORT": "8080",
    "STENOGRAPH_PORT_8080_TCP_ADDR": "10.0.0.11", "STENOGRAPH_ENGINE_SERVICE_HOST": "10.0.0.12",
    "STENOGRAPH_ENGINE_PORT": "tcp://10.0.0.12:30000", "STENOGRAPH_ENGINE_PORT_30000_TCP_ADDR": "10.0.0.12",
}  # fmt: skip
"""What a container is given beside Services named `stenograph` and `stenograph-engine`."""


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_ignored():
    loaded = load_settings({}, {**OF_A_SERVICE, "STENOGRAPH_MAX_BATCH": "3", "XDG_CACHE_HOME": "/x"}, None)
    assert loaded == CommandSettings(cache_dir=Path("/x/stenograph"), max_batch=3)
    assert kubernetes_variables({**OF_A_SERVICE, "STENOGRAPH_MAX_BATCH": "3"}) == sorted(OF_A_SERVICE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("STENOGRAPH_PORT", "tcp:/10.0.0.11"), ("STENOGRAPH_PORTS", "8080"), ("STENOGRAPH_ENGINE_PORT", "8080"),
        ("STENOGRAPH_PORT_HTTP_TCP", "8080"), ("STENOGRAPH_SERVICE", "x"), ("STENOGRAPH_HOST", ""),
    ],
)  # fmt: skip
def test_variables_that_kubernetes_would_not_set_still_stop_the_start(key: str, value: str):
    with pytest.raises(StartupError, match=f"{key}'? in the environment"):
        load_settings({}, {key: value}, None)


def test_each_part_s_settings_are_among_a_command_s_and_a_server_without_them_has_their_defaults() -> None:
    classes = [one for one in vars(parts).values() if isinstance(one, type) and one.__module__ == parts.__name__]
    declared = [one for one in classes if is_dataclass(one)]
    assert len(declared) == 8
    for one in declared:
        assert issubclass(CommandSettings, one)
        assert settings_of(one, Settings()) == one()
    changed = CommandSettings(max_batch=3)
    assert settings_of(EmbeddedSettings, changed) is changed
