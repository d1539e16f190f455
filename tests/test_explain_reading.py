"""What ``gpuguard explain`` reads: files, folders, pipes, gzip, other encodings; and what cannot be read."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from .boot_logs import FAILED, READY, STAMP, dies, loading, tp
from .explained import Capture, explained, objects
from .gpuguard_command import ran
from .needs import need_tool


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(FAILED)
    return path


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    path = tmp_path / "ready.log"
    path.write_text(READY)
    return path


# ------------------------------------------------------------------------------------------------------- what it reads


def test_several_logs_are_explained_in_their_order_and_each_once(failed: Path, ready: Path, capsys: Capture) -> None:
    assert [one["outcome"] for one in objects(capsys, ready, failed, ready)] == ["ready", "oom.kv_pool"]


def test_a_folder_is_every_log_in_it_and_below(tmp_path: Path, capsys: Capture) -> None:
    deep = tmp_path / "logs" / "a" / "b"
    deep.mkdir(parents=True)
    names = ["a/b/one.log", "a/two.OUT", "a/three.log.gz", "four.txt", "five.stderr", "six.md", "seven", "eight.json"]
    for name in names:
        path = tmp_path / "logs" / name
        path.write_bytes(gzip.compress(READY.encode()) if name.endswith(".gz") else READY.encode())
    os.mkfifo(deep / "pipe.log")  # would never end
    (deep / "folder.log").mkdir()
    found = [os.path.relpath(one["log"], tmp_path / "logs") for one in objects(capsys, tmp_path / "logs")]
    assert found == ["a/b/one.log", "a/three.log.gz", "a/two.OUT", "five.stderr", "four.txt"]


def test_a_folder_without_logs_is_said_and_the_others_are_explained(
    tmp_path: Path, failed: Path, capsys: Capture
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = explained(capsys, empty, failed)
    assert done.code == 2
    assert done.err == f"{empty}: no logs in this folder (.log, .txt, .out, .err, .stdout, .stderr, also with .gz)\n"
    assert "oom.kv_pool" in done.out


def test_gzip_is_recognised_whatever_its_name(tmp_path: Path, capsys: Capture) -> None:
    for name in ("a.log.gz", "a.log", "a"):
        (tmp_path / name).write_bytes(gzip.compress(FAILED.encode()))
        assert "oom.kv_pool" in explained(capsys, tmp_path / name).out


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_standard_input_is_read(packed: bool) -> None:
    data = gzip.compress(FAILED.encode()) if packed else FAILED.encode()
    done = ran("explain", "--json", "-", input=data)
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["outcome"] == "oom.kv_pool"
    assert json.loads(done.out)["log"] == "-"


def test_standard_input_that_is_closed_is_said() -> None:
    for option in ((), ("--follow",)):
        done = ran("explain", *option, "-", before=("sh", "-c", 'exec "$0" "$@" <&-'))
        assert (done.code, done.err, done.out) == (2, "-: standard input is closed\n", "")


def test_a_log_that_was_cut_while_it_was_written_begins_with_a_hole(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(bytes(3 << 20) + FAILED.encode())
    assert "oom.kv_pool in phase kv_pool" in explained(capsys, path).out
    path.write_bytes(bytes(3 << 20))
    assert explained(capsys, path).err == f"{path}: the log is empty\n"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-8"])
def test_a_log_that_begins_with_a_mark_is_read_in_its_encoding(
    encoding: str, packed: bool, tmp_path: Path, capsys: Capture
) -> None:
    """As PowerShell redirects it; longer than one chunk, with a line that is cut in a character."""
    path = tmp_path / "x.log"
    text = "\ufeff" + "".join(f"{STAMP}] 部 {number}\r\n" for number in range(40_000)) + FAILED.replace("\n", "\r\n")
    data = text.encode(encoding) + (b"\x0a" if encoding != "utf-8" else b"")
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    (said,) = objects(capsys, path)
    assert (said["outcome"], said["decisive"]["line"]) == ("oom.kv_pool", 40_021)
    assert said["lines"] == 40_000 + FAILED.count("\n")


def test_marks_without_a_log_are_told(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x.log"
    for data in (b"\xff", b"\xff\xfe", b"\xfe\xff", b"\xff\xfe\0\0", b"\xff\xfe" + bytes(9000)):
        path.write_bytes(data)
        assert explained(capsys, path).err == f"{path}: the log is empty\n", data
    path.write_bytes(b"\xff\xfe" + bytes(range(1, 9)).decode().encode("utf-16-le") * 200)
    assert explained(capsys, path).err == f"{path}: this is binary data, not a log\n"


UNREADABLE = {
    "missing": (None, "No such file or directory"),
    "empty": (b"", "the log is empty"),
    "binary": (bytes(range(256)) * 20, "this is binary data, not a log"),
    "cut gzip": (gzip.compress(FAILED.encode() * 50)[:400], "the gzip file is cut short"),
    "damaged gzip": (gzip.compress(os.urandom(9000))[:60] + bytes(9000), "the gzip file is damaged: "),
    "gzip with the wrong sum": (gzip.compress(FAILED.encode())[:-8] + bytes(8), "the gzip file is damaged: "),
    "empty gzip": (gzip.compress(b""), "the log is empty"),
    "binary in gzip": (gzip.compress(bytes(range(256)) * 20), "this is binary data, not a log"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_named_with_its_cause_and_the_others_are_explained(
    kind: str, tmp_path: Path, failed: Path, capsys: Capture
) -> None:
    content, cause = UNREADABLE[kind]
    path = tmp_path / "x.log"
    if content is not None:
        path.write_bytes(content)
    done = explained(capsys, path, failed)
    assert done.code == 2
    assert done.err.startswith(f"{path}: {cause}")
    assert len(done.err.splitlines()) == 1
    assert done.out.startswith(f"{failed}: oom.kv_pool")


def as_an_ordinary_user() -> tuple[str, ...]:
    """The words of a command for whose child file modes count, also where the tests are run by root."""
    if os.geteuid() != 0:
        return ()
    return (need_tool("setpriv"), "--bounding-set=-dac_override,-dac_read_search")


def test_what_may_not_be_read_is_named_and_the_others_are_explained(tmp_path: Path, failed: Path) -> None:
    user = as_an_ordinary_user()
    secret, folder = tmp_path / "secret.log", tmp_path / "folder"
    listed = tmp_path / "listed"
    for one in (folder, listed):
        one.mkdir()
        (one / "a.log").write_text(READY)
    (folder / "below").mkdir()
    secret.write_text(READY)
    modes = ((secret, 0), (folder / "below", 0), (listed, 0o444))
    for path, mode in modes:
        path.chmod(mode)
    try:
        done = ran("explain", secret, folder, listed, failed, before=user)
    finally:
        for path, _ in modes:
            path.chmod(0o755)
    assert done.code == 2
    assert done.err.splitlines() == [
        f"{secret}: Permission denied",
        f"{folder / 'below'}: Permission denied",
        f"{listed / 'a.log'}: Permission denied",
    ]
    assert [line.split(": ")[1] for line in done.out.splitlines() if line[:1] != " "] == [
        "ready (sglang, 11 lines)",
        "oom.kv_pool in phase kv_pool (sglang)",
    ]


def test_a_folder_that_vanishes_while_it_is_read_is_said(
    tmp_path: Path, failed: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    isdir = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: str(path) == str(gone) or isdir(path))
    done = explained(capsys, gone, failed)
    assert (done.code, done.err) == (2, f"{gone}: No such file or directory\n")
    assert "oom.kv_pool" in done.out


def test_a_link_to_nowhere_in_a_folder_is_said(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.log").write_text(READY)
    (folder / "old.log").symlink_to(tmp_path / "rotated away")
    done = explained(capsys, folder)
    assert (done.code, done.err) == (2, f"{folder / 'old.log'}: No such file or directory\n")
    assert "ready" in done.out


@pytest.mark.parametrize("name", ["we\nird \x1b[31mname.log", "tab\tand\u202ertl.log", "ümlaut 文件.log"])
def test_a_name_with_odd_letters_stays_one_line_and_does_nothing_to_a_terminal(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / name
    path.write_text(FAILED)
    done = explained(capsys, path)
    first = done.out.splitlines()[0]
    assert first.endswith(": oom.kv_pool in phase kv_pool (sglang)")
    assert not set("\x1b\u202e\t") & set(done.out)
    assert ("ümlaut 文件.log" in first) == (name[0] == "ü")
    assert objects(capsys, path)[0]["log"] == str(path)  # a program gets the name as it is
    path.unlink()
    assert "\x1b" not in explained(capsys, path).err


def test_a_name_that_is_no_text_is_read_too(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/raw\xff.log"
    with open(path, "wb") as stream:
        stream.write(FAILED.encode())
    done = ran("explain", os.fsdecode(path))
    assert (done.code, done.err) == (0, "")
    assert "oom.kv_pool" in done.out


def test_what_a_log_says_does_nothing_to_a_terminal(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x.log"
    path.write_text(loading(tp(2), 94.0) + dies("ValueError: \x1b]0;title\x07 and \x9b31m and \u202e back"))
    done = explained(capsys, path)
    assert r"ValueError: \x1b]0;title\x07 and \x9b31m and \u202e back" in done.out
