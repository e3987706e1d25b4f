"""The settings of servers on a Ray cluster: as variables, those of each machine, and what is refused. Needs no Ray."""

import importlib.util
import json
from pathlib import Path

import pytest

from stenograph.cli.main import main
from stenograph.cli.settings_table import given_settings, load_settings
from stenograph.cluster.ray import Machine, start, variables_at, variables_of
from stenograph.core.errors import StartupError

GIVEN = {
    "model": "m.gguf",
    "engine": "sglang",
    "engine_url": ["http://a:1", "http://b:2"],
    "store": "postgresql://me@db/x",
    "lease": "2.5",
    "max_in_flight": "7",
    "chat_template_kwargs": '{"thinks": [false, 1.5], "comma": "a,b"}',
    "session_ttl": "0.5",
    "cache_dir": "/c",
    "support": "on",
    "api_key": ["one", "two"],
}


def test_variables_say_the_same_as_flags_a_file_and_the_environment() -> None:
    expected = load_settings(GIVEN, {}, None)
    assert load_settings({}, variables_of(given_settings(GIVEN, {}, None)), None) == expected
    typed = {
        **GIVEN,
        "lease": 2.5,
        "max_in_flight": 7,
        "chat_template_kwargs": json.loads(str(GIVEN["chat_template_kwargs"])),
    }
    assert load_settings({}, variables_of({**typed, "family": None, "cache_dir": Path("/c")}), None) == expected


@pytest.mark.parametrize(
    ("address", "port", "url"), [("10.0.0.5", 8080, "http://10.0.0.5:8080"), ("fd00::5", 81, "http://[fd00::5]:81")]
)
def test_each_machine_has_its_own_address(address: str, port: int, url: str) -> None:
    machine = Machine(number="a1", address=address)
    own, found = variables_at({"STENOGRAPH_STORE": "postgresql://db/x", "STENOGRAPH_PORT": "0"}, machine, port)
    assert found == url
    loaded = load_settings({}, own, None)
    assert (loaded.host, loaded.port, loaded.advertise_url) == (address, port, url)
    own, _ = variables_at({"STENOGRAPH_HOST": "0.0.0.0"}, machine, port)
    loaded = load_settings({}, own, None)
    assert (loaded.host, loaded.advertise_url) == ("0.0.0.0", None)


def test_an_address_that_is_each_machine_s_own_is_refused() -> None:
    with pytest.raises(StartupError, match="each machine's own"):
        start({"advertise_url": "http://10.0.0.5:80"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--prot", "3"), "unknown flag --prot; did you mean --port?"),
        (("up", "--port", "70000"), "bad value '70000' for --port on the command line"),
        (("up", "--lease", "2"), "--advertise-url and --lease are of servers that share a database"),
        (("up", "--store", "postgresql://db/x", "--advertise-url", "http://a:1"), "each machine's own"),
        (("down", "--port", "3"), "--port is of ray up, not of ray down"),
        (("status", "--config", "x.toml"), "--config is of ray up, not of ray status"),
        (("sideways",), "invalid choice: 'sideways'"),
    ],
)
def test_what_ray_cannot_be_asked_is_said_in_a_line(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["ray", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert says in said
    assert len(said.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ray", "status"]) == 2
    assert "pip install -e '.[ray]'" in capsys.readouterr().err
