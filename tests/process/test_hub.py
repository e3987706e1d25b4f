"""`--model ORG/NAME` is the Hugging Face cache's folder of it, or is fetched from a hub into it, whole and checked."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.hub_server import COMMIT, HubServer, Repository
from standins.tiny.llama import write_tiny_folder
from stenograph.core.errors import StartupError
from stenograph.model.fetch import resolve_model
from stenograph.model.hub import hub_cache, repository_of
from stenograph.model.progress import StreamProgress

NAME = "some-org/tiny-1.0"
CACHED = "models--some-org--tiny-1.0"
TEXT = {"tokenizer.json", "tokenizer_config.json", "config.json"}
WEIGHTS = "model.safetensors"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"))
    mine = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert mine.keys() == TEXT | {WEIGHTS}
    others = {"README.md": b"# Tiny", "pytorch_model.bin": b"\x00" * 999, "original/config.json": b"{}"}
    return {**mine, **others, "consolidated.safetensors": b"\x00" * 99}


@pytest.fixture
def repository(contents: dict[str, bytes]) -> Repository:
    return Repository(files=dict(contents), large=frozenset({WEIGHTS, "tokenizer.json"}))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub"


@pytest.fixture
def hub(cache: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that has the repository, and an environment with a cache of its own that points to it."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "STENOGRAPH", "TRANSFORMERS"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    monkeypatch.setenv("NO_PROXY", "*")
    with HubServer(**{NAME: repository}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


ROOT = str(Path(__file__).parents[2])
BENCHMARKS = f"import sys; sys.path.insert(0, {ROOT!r}); from benchmarks.__main__ import main; sys.exit(main())"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command line in a process of its own."""
    return ran([sys.executable, "-m", "stenograph.cli.main", *arguments])


def ran(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)


def fetched(name: str = NAME, *, weights: bool = True) -> Path:
    return resolve_model(name, cache_dir=Path("none"), progress=StreamProgress(io.StringIO()), weights=weights)


def refusal(name: str = NAME, *, weights: bool = True) -> str:
    """The one line that says why there is no such model."""
    with pytest.raises(StartupError) as caught:
        fetched(name, weights=weights)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


def blobs_of(cache: Path) -> set[bytes]:
    return {path.read_bytes() for path in (cache / CACHED / "blobs").glob("*")}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_needed_files_are_fetched_once_with_progress_and_then_no_hub_is_asked(
    cache: Path, hub: HubServer, contents: dict[str, bytes]
) -> None:
    done = run("fetch", "--model", NAME)
    folder = cache / CACHED / "snapshots" / COMMIT
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: contents[name] for name in TEXT | {WEIGHTS}
    }
    said = done.stderr.splitlines()
    assert said[0] == f"fetching {NAME} from the Hugging Face hub: 0 %"
    assert said[-1] == f"fetching {NAME} from the Hugging Face hub: 100 %"
    hub.asked.clear()
    assert fetched(NAME) == fetched(f"hf:{NAME}") == folder
    assert hub.asked == []


def test_a_cached_model_needs_no_hub_and_no_huggingface_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetched()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert fetched() == folder


def test_weights_are_fetched_where_they_are_needed_alone(hub: HubServer) -> None:
    folder = fetched(weights=False)
    assert names_in(folder) == TEXT
    num_asked = len(hub.asked)
    assert fetched(weights=False) == folder
    assert len(hub.asked) == num_asked
    assert fetched() == folder
    assert names_in(folder) == TEXT | {WEIGHTS}
    assert sum("GET" in line and f"/{COMMIT}/tokenizer.json" in line for line in hub.asked) == 1


def test_verify_and_bench_take_a_hubs_name_and_leave_its_weights(hub: HubServer, tmp_path: Path) -> None:
    done = run("verify", "--model", f"hf:{NAME}", "--family", "smollm2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TITO is exact for this model." in done.stdout
    flags = (
        "--messages",
        "4",
        "--message-bytes",
        "64",
        "--repeats",
        "1",
        "--family",
        "smollm2",
        "--out",
        str(tmp_path / "out"),
    )
    done = ran([sys.executable, "-c", BENCHMARKS, "render", "--model", NAME, *flags])
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any(WEIGHTS in line for line in hub.asked)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", WEIGHTS])
def test_a_file_with_another_hash_is_refused_and_nothing_of_it_is_kept(
    cache: Path, hub: HubServer, repository: Repository, contents: dict[str, bytes], name: str
) -> None:
    repository.damaged.add(name)
    line = refusal()
    assert f"{name} as it was downloaded has the hash" in line
    assert repository.etag(name) in line
    assert blobs_of(cache) <= set(contents.values())
    assert not list(cache.rglob(name))
    assert not (cache / CACHED / "refs" / "main").exists()
    repository.damaged.clear()
    assert (fetched() / name).read_bytes() == contents[name]


def test_a_damaged_file_that_an_ended_fetch_left_is_fetched_again(
    cache: Path, hub: HubServer, contents: dict[str, bytes]
) -> None:
    folder = fetched()
    (cache / CACHED / "refs" / "main").unlink()
    (folder / WEIGHTS).resolve().write_bytes(contents[WEIGHTS][:-1] + b"?")
    assert fetched() == folder
    assert (folder / WEIGHTS).read_bytes() == contents[WEIGHTS]


def test_a_cut_download_says_so_and_the_next_start_keeps_what_was_whole(
    cache: Path, hub: HubServer, repository: Repository, contents: dict[str, bytes]
) -> None:
    repository.cut.add(WEIGHTS)
    line = refusal()
    assert f"{hub.url} answered 503" in line
    assert "complete files are kept: run it again" in line
    assert not list(cache.rglob("*.incomplete"))
    assert not (cache / CACHED / "refs" / "main").exists()
    repository.cut.clear()
    hub.asked.clear()
    assert (fetched() / WEIGHTS).read_bytes() == contents[WEIGHTS]
    assert not any("/tokenizer.json" in line for line in hub.asked)


def test_a_progress_that_raises_ends_the_download_and_leaves_no_part_of_a_file(cache: Path, hub: HubServer) -> None:
    def interrupted(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(NAME, cache_dir=cache, progress=interrupted)
    assert not list(cache.rglob("*.incomplete"))
    assert not (cache / CACHED / "refs" / "main").exists()


def test_a_hub_that_is_not_there_is_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    line = refusal()
    assert f"model {NAME!r}: the download from http://127.0.0.1:9 broke off" in line
    assert "HF_ENDPOINT" in line


def test_a_repository_that_the_hub_does_not_have_or_not_give_is_one_line(
    hub: HubServer, contents: dict[str, bytes]
) -> None:
    hub.repositories |= {
        "a/gated": Repository(files=contents, is_gated=True),
        "a/text-only": Repository(files={"tokenizer.json": contents["tokenizer.json"]}),
        "a/no-tokenizer": Repository(files={"config.json": b"{}", "tokenizer.model": b"?"}),
    }
    said = {"a/gated": "is gated: accept its terms at", "a/text-only": "has no model.safetensors"}
    said |= {"a/no-tokenizer": "has no tokenizer.json", "a/none": "has no such repository, or it is private"}
    for name, why in said.items():
        assert why in refusal(name)


def test_offline_nothing_is_fetched_and_the_error_says_what_is_missing(
    cache: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refusal()
    assert "there is no such folder" in line
    assert f"{str(cache)!r} has no file of it; HF_HUB_OFFLINE is set" in line
    assert hub.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fetched(weights=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refusal(f"hf:{NAME}")
    assert "has no model.safetensors of it" in line
    assert "no such folder" not in line


def test_without_huggingface_hub_the_error_names_what_to_install(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = refusal()
    assert "pip install huggingface_hub (or, in a checkout, pip install -e '.[hub]')" in line
    assert hub.asked == []


def test_a_folder_of_that_name_wins(
    cache: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert fetched() == Path(NAME)
    assert hub.asked == []
    assert fetched(f"hf:{NAME}") == cache / CACHED / "snapshots" / COMMIT


def test_shards_that_the_index_names_are_needed_too(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = {f"model-0000{number}-of-00002.safetensors": b"%d" % number for number in (1, 2)}
    del repository.files[WEIGHTS]
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    repository.files |= {**shards, "model.safetensors.index.json": index}
    folder = fetched()
    assert shards.keys() < names_in(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert fetched() == folder
    assert shards.keys() < names_in(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "has no model-00002-of-00002.safetensors of it" in refusal()


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf:gpt2", "gpt2"),
        ("gpt2", None),
        ("./a/b", None),
        ("/a/b", None),
        ("a/b/c", None),
        ("a/b.gguf", None),
        ("a/..", None),
        ("a/b\n", None),
    ],
)
def test_a_repositorys_name_is_told_from_a_path(name: str, repository: str | None) -> None:
    assert repository_of(name) == repository


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:../a", "hf:a b", "hf:a/b--c", "hf:" + "x" * 9999 + "/"])
def test_an_invalid_repository_name_after_hf_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match=r"what follows hf: must be a repository's name") as caught:
        resolve_model(name, cache_dir=tmp_path, progress=StreamProgress(io.StringIO()))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(environment: dict[str, str], folder: str) -> None:
    assert hub_cache(environment) == Path(folder)
