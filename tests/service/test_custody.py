"""The custody of samples: whatever differs between a file and the store is found, and named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from stenograph.cli.main import main

from .conftest import Live, user
from .test_durable import Serve, conversation, folder, kept

pytestmark = pytest.mark.timeout(600)

__all__ = ["folder", "kept"]  # fixtures

FORMATS = ("safetensors", "json", "arrow")


async def samples_of(live: Live, session: str, kind: str = "json", **wishes: Any) -> bytes:
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": kind, **wishes})
    assert answer.status == 200, answer.body
    return answer.body


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """The exit code and the lines of `check --samples`, for the contents of files."""

    def run(store: Path, *contents: bytes) -> tuple[int, list[str]]:
        flags: list[str] = []
        for number, content in enumerate(contents):
            (tmp_path / f"samples-{number}").write_bytes(content)
            flags += ["--samples", str(tmp_path / f"samples-{number}")]
        code = main(["check", str(store), *flags])
        return code, capsys.readouterr().out.splitlines()

    return run


async def recorded(live: Live, history: str = "strands") -> str:
    live.engine.weight_version = "7"
    session = await live.open(history=history)
    messages = await conversation(live, session, turns=["one", "two words", "three"])
    live.says("another ending")  # replaces the last turn; a tree branches after the first
    again = [*messages[:2], user("something else")] if history == "tree" else messages[:-1]
    assert (await live.chat(session, *again, seed=9)).status == 200
    return session


@pytest.mark.parametrize("kind", FORMATS)
async def test_samples_as_they_were_given_are_what_the_store_holds(
    kept: Serve, folder: Any, tmp_path: Path, check: Any, kind: str
) -> None:
    contents: list[bytes] = []
    num_trained = 0
    async with kept() as live:
        for history in ("strands", "linear", "tree"):
            session = await recorded(live, history)
            contents.append(await samples_of(live, session, kind))
            num_trained += sum(sum(s["loss_mask"]) for s in json.loads(await samples_of(live, session))["samples"])
        cut = await recorded(live)
        longest = max(len(one["tokens"]) for one in json.loads(await samples_of(live, cut))["samples"])
        contents.append(await samples_of(live, cut, kind, max_seq_len=longest - 3, include_side=True))
        shutil.copytree(folder.path, tmp_path / "copy")
    code, lines = check(tmp_path / "copy", *contents)
    assert code == 0, lines
    assert lines[-1].endswith("trained tokens: what the store holds")
    assert int(lines[-1].split(", ")[1].split()[0]) > num_trained > 0


async def test_a_session_in_memory_has_the_same_custody_without_a_store(serve: Serve) -> None:
    async with serve() as live:
        session = await recorded(live, "tree")
        first, second = [json.loads(await samples_of(live, session))["samples"] for _ in range(2)]
        assert first == second
    custodies = [one["metadata"]["custody"] for one in first]
    assert {one["session_id"] for one in custodies} == {session}
    # Lines that share their first turn share its digest, one of them trains it, and no two turns have the same.
    (a, b) = [one["digests"] for one in custodies]
    assert a[0] == b[0]
    assert len({*a, *b}) == 4
    assert [one["trained"] for one in custodies] == [[0, 1, 2], [3]]


Change = Callable[[dict[str, Any]], None]


def flip_id(sample: dict[str, Any]) -> None:
    sample["tokens"][sample["turns"][1]["start"]] ^= 1


def flip_prompt_id(sample: dict[str, Any]) -> None:
    sample["tokens"][0] ^= 1


def flip_logprob(sample: dict[str, Any]) -> None:
    at = sample["loss_mask"].index(1)
    sample["rollout_log_probs"][at] = float(np.nextafter(sample["rollout_log_probs"][at], -1.0))


def flip_sampling_logprob(sample: dict[str, Any]) -> None:
    sample["sampling_log_probs"][sample["loss_mask"].index(1)] -= 1e-9


def flip_mask_off(sample: dict[str, Any]) -> None:
    sample["loss_mask"][sample["loss_mask"].index(1)] = 0


def flip_mask_on(sample: dict[str, Any]) -> None:
    at = sample["turns"][1]["prompt_start"] - (len(sample["tokens"]) - sample["response_length"])
    sample["loss_mask"][at] = 1


def turn_of_another_digest(sample: dict[str, Any]) -> None:
    sample["metadata"]["custody"]["digests"][0] = "0" * 64


def a_token_of_one_turn_counts_as_the_next_one_s(sample: dict[str, Any]) -> None:
    sample["turns"][0]["end"] -= 1
    sample["turns"][1]["prompt_start"] -= 1


def longer_than_its_turns(sample: dict[str, Any]) -> None:
    sample["tokens"].append(7)
    sample["loss_mask"].append(0)
    sample["rollout_log_probs"].append(0.0)
    for name in ("raw_log_probs", "sampling_log_probs"):
        if sample[name] is not None:
            sample[name].append(0.0)
    sample["response_length"] += 1


def other_weights(sample: dict[str, Any]) -> None:
    sample["weight_spans"][0]["version"] = "another"


def without_custody(sample: dict[str, Any]) -> None:
    del sample["metadata"]["custody"]


def turn_that_is_none(sample: dict[str, Any]) -> None:
    sample["turns"][1]["node_id"] = 77


def turns_in_another_order(sample: dict[str, Any]) -> None:
    first, second = sample["turns"][0], sample["turns"][1]
    first["node_id"], second["node_id"] = second["node_id"], first["node_id"]


CHANGES: list[tuple[Change, str]] = [
    (flip_id, r"turn 1 (row 2): token"),
    (flip_prompt_id, r"turn 0 (row 1): token 0 is"),
    (flip_logprob, r"turn 0 (row 1): rollout_log_probs of token"),
    (flip_sampling_logprob, r"turn 0 (row 1): sampling_log_probs of token"),
    (flip_mask_off, r"turn 0 (row 1): loss_mask of token"),
    (flip_mask_on, r"turn 1 (row 2): loss_mask of token"),
    (turn_of_another_digest, r"turn 0 (row 1): its digest is 000"),
    (a_token_of_one_turn_counts_as_the_next_one_s, r"turn 0: it has"),
    (longer_than_its_turns, r"its turns end at token"),
    (other_weights, r"turn 0 (row 1): tokens"),
    (without_custody, r"it does not say which session and turns it is made of"),
    (turn_that_is_none, r"turn 77 is not in the session"),
    (turns_in_another_order, r"turn 1 follows turn 0 in the store, and is the first in the sample"),
]


async def test_each_change_of_a_sample_is_found_and_named(kept: Serve, folder: Any, tmp_path: Path, check: Any) -> None:
    async with kept() as live:
        session = await recorded(live)
        content = await samples_of(live, session)
        shutil.copytree(folder.path, tmp_path / "copy")
    assert check(tmp_path / "copy", content)[0] == 0
    for change, told in CHANGES:
        changed = json.loads(content)
        change(changed["samples"][0])
        code, lines = check(tmp_path / "copy", json.dumps(changed).encode())
        assert code == 1, change
        assert lines[0].startswith("samples-0: sample 0: ")
        assert told in lines[0], (change, lines)
        assert session in lines[0] or change is without_custody


async def test_a_sample_that_names_another_session_or_none_that_is_kept_is_found(
    kept: Serve, folder: Any, tmp_path: Path, check: Any
) -> None:
    async with kept() as live:
        one, other = [await live.open() for _ in range(2)]
        for session in (one, other):  # the same words: only the digests differ
            await conversation(live, session, turns=["one", "two"])
        content = await samples_of(live, one)
        shutil.copytree(folder.path, tmp_path / "copy")
    code, lines = check(tmp_path / "copy", content.replace(one.encode(), other.encode()))
    assert code == 1
    assert f"session {other}: turn 0 (row 1): its digest is" in lines[0]
    code, lines = check(tmp_path / "copy", content.replace(one.encode(), b"0" * 32))
    assert (code, "is not in the store" in lines[0]) == (1, True)


async def test_a_sample_of_a_turn_that_was_replaced_is_found(
    kept: Serve, folder: Any, tmp_path: Path, check: Any
) -> None:
    async with kept() as live:
        session = await live.open()
        messages = await conversation(live, session, turns=["one", "two"])
        early = await samples_of(live, session)
        live.says("two again")
        assert (await live.chat(session, *messages[:-1], seed=9)).status == 200
        late = await samples_of(live, session)
        shutil.copytree(folder.path, tmp_path / "copy")
    code, lines = check(tmp_path / "copy", early)
    assert code == 1
    assert lines[:-1] == [
        f"samples-0: sample 0: session {session}: turn 1 (row 2) was replaced by a later turn:"
        " no sample has it any more"
    ]
    assert check(tmp_path / "copy", late)[0] == 0


async def test_a_turn_that_two_samples_train_is_found(kept: Serve, folder: Any, tmp_path: Path, check: Any) -> None:
    async with kept() as live:
        session = await recorded(live, "tree")
        content = await samples_of(live, session)
        shutil.copytree(folder.path, tmp_path / "copy")
    code, lines = check(tmp_path / "copy", content, content)
    assert code == 1
    assert "turn 0 is trained by samples-0: sample 0 too" in lines[0]
    twice = json.loads(content)
    sample = twice["samples"][1]
    first, row = len(sample["tokens"]) - sample["response_length"], sample["turns"][0]
    for at in range(row["start"] - first, row["end"] - first):
        sample["loss_mask"][at] = 1
    sample["metadata"]["custody"]["trained"].append(0)
    code, lines = check(tmp_path / "copy", json.dumps(twice).encode())
    assert (code, any("is trained by samples-0: sample 0 too" in line for line in lines)) == (1, True)


async def test_a_changed_byte_is_found_in_each_format(kept: Serve, folder: Any, tmp_path: Path, check: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    async with kept() as live:
        session = await recorded(live)
        payload, table = [await samples_of(live, session, kind) for kind in ("safetensors", "arrow")]
        shutil.copytree(folder.path, tmp_path / "copy")
    for name in ("tokens.0", "loss_mask.0", "rollout_log_probs.0"):
        tensors = {key: np.array(value) for key, value in load(payload).items()}
        tensors[name].view(np.uint8)[-2 * tensors[name].itemsize] ^= 1
        code, lines = check(tmp_path / "copy", save(tensors))
        assert code == 1
        assert "turn 3 (row 4): " in lines[0]
        assert ("token" if name == "tokens.0" else name[:-2]) in lines[0]
    rows = pa.ipc.open_stream(table).read_all()
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        values = rows.column(name).to_pylist()
        values[0][-2] = 0 if name == "loss_mask" else values[0][-2] - 1
        column = pa.array(values, rows.schema.field(name).type)
        changed = rows.set_column(rows.schema.get_field_index(name), name, column)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, changed.schema) as writer:  # also as other programs write it
            writer.write_table(changed)
        code, lines = check(tmp_path / "copy", sink.getvalue().to_pybytes())
        assert (code, "turn 3 (row 4): " in lines[0]) == (1, True)


async def test_a_session_that_is_damaged_and_a_file_that_is_none_are_named(
    kept: Serve, folder: Any, tmp_path: Path, check: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with kept() as live:
        session = await recorded(live)
        content = await samples_of(live, session)
        await live.chat(None, user("hello"))
        shutil.copytree(folder.path, tmp_path / "copy")
    for wrong in (b"", b"hello, I am no file", b"{}", b'{"samples": [1]}', b"\xff\xff\xff\xff1234"):
        assert check(tmp_path / "copy", wrong)[0] == 2
    assert main(["check", str(tmp_path / "copy"), "--samples", str(tmp_path / "no")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    log = tmp_path / "copy" / "00.sqlite3-wal"
    log.write_bytes(log.read_bytes().replace(b"two words", b"two wards"))
    main(["check", str(tmp_path / "copy")])
    capsys.readouterr()
    code, lines = check(tmp_path / "copy", content)
    assert code == 1, lines
