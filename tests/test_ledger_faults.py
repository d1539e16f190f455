"""What can go wrong with a ledger is told with cause and cure, without a password, and costs nothing that was kept."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pytest_gpuguard.ledger.store import LedgerError, open_ledger

from .ledger_values import a_record, a_run
from .postgres import Postgres
from .postgres import started_postgres as started_postgres


def refused(url: str) -> str:
    with pytest.raises(LedgerError) as caught:
        open_ledger(url)
    told = str(caught.value)
    assert len(told) < 900
    assert "Background on this error" not in told
    assert caught.value.__cause__ is None
    return told


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://u:hush-hush@h/db", "cannot be kept at mysql://: give sqlite:///PATH, postgresql://"),
        ("postgresql+asyncpg://u:hush-hush@h/db", "cannot be kept at postgresql+asyncpg://"),
        ("postgresql://u:hush-hush@h:port/db", "special characters in the password"),
        ("", "must be a file"),
        ("sqlite://", "must be a file"),
        ("sqlite:///:memory:", "must be a file"),
        ("a\0b", "must be a file"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, said: str) -> None:
    told = refused(url)
    assert said in told
    assert "hush" not in told


@pytest.mark.parametrize("spelling", ["sqlite:///{}", "{}"])
def test_a_file_is_named_by_url_or_by_path(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("here.db", str(tmp_path / "new" / "a b%41?x=1#é.db")):
        with open_ledger(spelling.format(path)) as store:
            assert store.url == str(tmp_path / path)
        assert (tmp_path / path).is_file()


def test_a_folder_and_a_place_below_a_file_are_refused(tmp_path: Path) -> None:
    assert "is a folder: name a file in it" in refused(str(tmp_path))
    (tmp_path / "file").write_text("")
    assert "cannot be made (" in refused(str(tmp_path / "file" / "ledger.db"))


def test_a_file_that_is_no_database_is_refused_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("my thesis\n" * 500)
    assert "is a file, but no SQLite database: name another file" in refused(str(file))
    assert file.read_text() == "my thesis\n" * 500


def test_a_database_of_others_is_refused_and_stays(tmp_path: Path) -> None:
    import sqlite3

    file = tmp_path / "places.sqlite"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE bookmarks (id INTEGER)")
    connection.close()
    before = file.read_bytes()
    assert "is a database, but no ledger: it has the tables bookmarks" in refused(str(file))
    assert file.read_bytes() == before


def test_an_empty_file_becomes_a_ledger(tmp_path: Path) -> None:
    (tmp_path / "l.db").touch()
    with open_ledger(str(tmp_path / "l.db")) as store:
        assert store.runs() == ()


def test_a_damaged_ledger_is_told(tmp_path: Path) -> None:
    file = tmp_path / "l.db"
    with open_ledger(str(file)) as store:
        store.begin(a_run(0))
        store.add([a_record(0, f"claim {number}") for number in range(300)])
    data = bytearray(file.read_bytes())
    data[4096:-4096] = os.urandom(len(data) - 8192)
    file.write_bytes(data)
    with pytest.raises(LedgerError, match=r"l\.db is damaged: restore it from a copy"), open_ledger(str(file)) as store:
        store.history("claim 7")


def in_child(script: str, *args: str, nobody: bool = False) -> str:
    """What a script prints; ``values`` and ``open_ledger`` are imported."""
    head = "import os, sys\nfrom pytest_gpuguard.ledger.store import LedgerError, open_ledger\n"
    head += "from tests.ledger_values import a_record, a_run\n"
    if nobody and os.geteuid() == 0:
        head += "os.setgid(65534); os.setuid(65534)\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script), *args], capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_folder_or_a_ledger_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    base = Path("/tmp") / f"gpuguard-ledger-{os.getpid()}"  # pytest's own folders are closed to others
    base.mkdir()
    try:
        with open_ledger(str(base / "l.db")) as store:
            store.begin(a_run(0))
        base.chmod(0o555)
        (base / "l.db").chmod(0o444)
        script = """
            for name in ("new.db", "sub/new.db", "l.db"):
                try:
                    with open_ledger(os.path.join(sys.argv[1], name)) as store:
                        store.begin(a_run(1))
                except LedgerError as error:
                    print(error)
        """
        new, below, old = in_child(script, str(base), nobody=True).splitlines()
        assert "new.db cannot be opened: the folder must exist, and this user must be allowed to write in it" in new
        assert "cannot be made (Permission denied): make it, or name another place" in below
        assert "give this user the right" in old or "must be allowed to write" in old
    finally:
        base.chmod(0o755)
        for file in base.iterdir():
            file.unlink()
        base.rmdir()


FILL = """
    with open_ledger(sys.argv[1]) as store:
        store.begin(a_run(0))
        kept = 0
        {limit}
        try:
            for number in range(10_000):
                store.add([a_record(0, f"claim {{number}}", evidence={{"x": os.urandom(2000).hex()}})])
                kept += 1
        except LedgerError as error:
            print(error)
        print(len(store.records("run-000")) - kept, kept)
        {unlimit}
        store.add([a_record(0, "and on")])
        print(len(store.records("run-000")) - kept)
"""


def full(told: str) -> None:
    error, kept, after = told.splitlines()
    assert "cannot be written" in error
    assert "make room there" in error
    assert kept.startswith("0 ")
    assert int(kept.split()[1]) > 10
    assert after == "1"


def test_a_limit_on_file_sizes_costs_nothing_that_was_added(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (900_000, resource.RLIM_INFINITY))"
    unlimit = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    full(in_child(FILL.format(limit=limit, unlimit=unlimit), str(tmp_path / "l.db")))


def test_a_full_disk_costs_nothing_that_was_added(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here (needs root)")
    try:
        (disk / "ballast").write_bytes(bytes(200_000))
        full(in_child(FILL.format(limit="", unlimit=f"os.unlink({str(disk / 'ballast')!r})"), str(disk / "l.db")))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    told = refused("postgresql://u:hush@localhost/db")
    assert "pip install 'pytest-gpuguard[postgres]'" in told
    assert "hush" not in told


def test_both_spellings_of_the_scheme_are_taken_and_no_password_is_shown(postgres: Postgres) -> None:
    url = postgres.database()
    asked = f"{url.replace(f':{postgres.password}', '')}?password={postgres.password}"
    for spelling in (url, url.replace("postgresql://", "postgres://"), asked, url + "?connect_timeout=3"):
        with open_ledger(spelling) as store:
            assert postgres.password not in store.url
            assert store.url.startswith("postgresql://ledger@127.0.0.1:")
            assert postgres.password not in repr(store._place)


def test_a_server_that_is_not_there_or_says_no_is_told(postgres: Postgres) -> None:
    url = postgres.database()
    assert "cannot be reached or used: is the server up" in refused(url.replace(f":{postgres.port}/", ":1/"))
    wrong = refused(url.replace(postgres.password, "wr0ng-w0rd"))
    assert "refuses this user or password" in wrong
    assert "wr0ng-w0rd" not in wrong
    assert "does not have what the URL names" in refused(postgres.url("no_such_database"))
    postgres.sql("CREATE DATABASE bare")
    assert "does not let this user write there: GRANT it CREATE" in refused(postgres.url("bare"))


def test_a_database_that_cannot_hold_every_text_is_refused(postgres: Postgres) -> None:
    latin = postgres.database("ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    assert "ENCODING 'UTF8'" in refused(latin)


def test_tables_of_others_in_a_servers_database_do_not_matter(postgres: Postgres) -> None:
    url = postgres.database()
    postgres.sql("CREATE TABLE runs (id int)", url.rsplit("/", 1)[1])
    with open_ledger(url) as store:
        assert store.runs() == ()


def test_a_server_that_comes_back_is_used_again_and_one_that_stays_away_is_told(postgres: Postgres) -> None:
    with open_ledger(postgres.database()) as store:
        store.begin(a_run(0))
        postgres.stop("immediate")
        postgres.start()
        store.add([a_record(0)])
        postgres.stop()
        try:
            with pytest.raises(LedgerError, match="cannot be reached or used: is the server up") as caught:
                store.add([a_record(0, "lost")])
            assert postgres.password not in str(caught.value)
        finally:
            postgres.start()
        assert [one.claim for one in store.records("run-000")] == ["tests/a.py::test_it"]


def test_a_connection_that_is_cut_in_the_middle_is_told_and_leaves_no_half(postgres: Postgres) -> None:
    with open_ledger(postgres.database()) as store:
        store.begin(a_run(0))
        store.amend(["kept"], lambda name, note: {"n": 1})

        def cut(name: str, note: object) -> dict[str, int]:
            postgres.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'ledger'")
            return {"n": 2}

        with pytest.raises(LedgerError, match="cannot be reached or used"):
            store.amend(["kept"], cut)
        assert store.notes() == {"kept": {"n": 1}}


@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.parametrize("folder", [0o555, 0o777], ids=["folder closed", "folder open"])
def test_a_ledger_that_may_only_be_read_is_read(journal: str, folder: int) -> None:
    base = Path("/tmp") / f"gpuguard-ledger-ro-{os.getpid()}"  # pytest's own folders are closed to others
    base.mkdir()
    try:
        with open_ledger(str(base / "l.db")) as store:
            store.begin(a_run(0))
            store.add([a_record(0)])
        with sqlite3.connect(base / "l.db") as connection:
            connection.execute(f"PRAGMA journal_mode={journal}")
        connection.close()
        (base / "l.db").chmod(0o444)
        base.chmod(folder)
        script = """
            with open_ledger(os.path.join(sys.argv[1], "l.db")) as store:
                print(store.history(a_record(0).claim)[0].verdict, store.latest()[0].run)
                try:
                    store.begin(a_run(1))
                except LedgerError as error:
                    print(error)
            print(os.listdir(sys.argv[1]))
        """
        read, written, files = in_child(script, str(base), nobody=True).splitlines()
        assert read == "HOLDS run-000"
        assert "may not be written: give this user the right to write the file and its folder" in written
        assert files == "['l.db']"
    finally:
        base.chmod(0o755)
        shutil.rmtree(base)


def test_a_reader_without_rights_sees_what_a_writer_adds() -> None:
    base = Path("/tmp") / f"gpuguard-ledger-rw-{os.getpid()}"
    base.mkdir()
    try:
        with open_ledger(str(base / "l.db")) as store:
            store.begin(a_run(0))
            script = """
                with open_ledger(os.path.join(sys.argv[1], "l.db")) as store:
                    print(len(store.runs()), flush=True)
                    print(sys.stdin.readline(), end="", flush=True)
                    print(len(store.runs()))
            """
            head = "import os, sys\nfrom pytest_gpuguard.ledger.store import open_ledger\n"
            head += "os.setgid(65534); os.setuid(65534)\n" if os.geteuid() == 0 else ""
            base.chmod(0o555)
            (base / "l.db").chmod(0o444)
            command = [sys.executable, "-c", head + textwrap.dedent(script), str(base)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdin is not None
                assert child.stdout is not None
                assert child.stdout.readline() == "1\n"
                if os.geteuid() == 0:  # only root writes on regardless of the rights
                    store.begin(a_run(1))
                child.stdin.write("go\n")
                child.stdin.flush()
                assert child.stdout.read().split() == ["go", "2" if os.geteuid() == 0 else "1"]
    finally:
        base.chmod(0o755)
        shutil.rmtree(base)


def test_a_user_who_may_only_select_reads_a_servers_ledger(postgres: Postgres) -> None:
    url = postgres.database()
    with open_ledger(url) as store:
        store.begin(a_run(0))
        store.add([a_record(0)])
    database = url.rpartition("/")[2]
    postgres.sql("CREATE ROLE reader LOGIN PASSWORD 'x'")
    postgres.sql("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", database)
    with open_ledger(url.replace(f"ledger:{postgres.password}@", "reader:x@")) as store:
        assert store.latest()[0].verdict == "HOLDS"
        with pytest.raises(LedgerError, match="does not let this user write there"):
            store.begin(a_run(1))
