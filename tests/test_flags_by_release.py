"""The tool that makes the flag table, on small wheels of our own in each of the three styles of declaring flags."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "flags_by_release.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flags_by_release", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FILLER = "".join(f'        parser.add_argument("--filler-{n}", type=int)\n' for n in range(60))
CALLS = (
    "class ServerArgs:\n    @staticmethod\n    def add_cli_args(parser):\n"
    '        parser.add_argument("--model-path", "--model", type=str, required=True)\n'
    '        parser.add_argument("--trust", action="store_true", help="Trust it.")\n'
    '        parser.add_argument("--old", action=DeprecatedAliasStoreAction, new_flag="--new", type=int)\n'
    '        parser.add_argument("--gone", action="store_true", help="(Deprecated: use --better=1) text")\n'
    '        parser.add_argument("--sizes", type=int, nargs="+")\n'
    '        parser.add_argument("--maybe", type=int, nargs="?")\n'
    '        parser.add_argument("--secret-door", help=argparse.SUPPRESS)\n' + FILLER
)
FIELDS = (
    "class Memory(msgspec.Struct):\n"
    '    page_size: A[Optional[int], "help"] = None\n'
    '    on: A[Optional[bool], Arg(help="x")] = None\n'
    '    many: A[Optional[List[int]], Arg(help="x", aliases=["--lots"])] = None\n'
    '    parsed: A[List[str], Arg(help="x", type_parser=json)] = None\n'
    "    internal: A[bool, Arg(no_cli=True)] = False\n"
    '    tp_size: A[int, Arg(help="x", cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1\n'
    '    both: A[bool, Arg(help="x", action=argparse.BooleanOptionalAction)] = False\n'
    "    plain: int = 3\n"
)


def wheel(folder: Path, version: str, *, fields: bool = False, calls: str = CALLS) -> Path:
    path = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sglang/srt/server_args.py", calls)
        archive.writestr("sglang/multimodal_gen/runtime/server_args.py", 'p.add_argument("--diffusion")\n')
        if fields:
            archive.writestr("sglang/srt/arg_groups/fields/memory.py", FIELDS)
    return path


def test_calls_and_fields_are_read_alike(tool: ModuleType, tmp_path: Path) -> None:
    flags = tool.read_release(wheel(tmp_path, "1", fields=True)).flags
    takes = {name: flag.takes for name, flag in flags.items() if not name.startswith("--filler")}
    assert takes == {
        "-h": "nothing", "--help": "nothing", "--model-path": "value", "--model": "value", "--trust": "nothing",
        "--old": "value", "--gone": "nothing", "--sizes": "list", "--maybe": "optional", "--secret-door": "value",
        "--page-size": "value", "--on": "nothing", "--many": "list", "--lots": "list", "--parsed": "value",
        "--tensor-parallel-size": "value", "--tp-size": "value", "--both": "nothing", "--no-both": "nothing",
    }  # fmt: skip
    assert (flags["--model"].alias_of, flags["--lots"].alias_of) == ("--model-path", "--many")
    assert (flags["--old"].deprecated, flags["--old"].use) == (True, "--new")
    assert (flags["--gone"].deprecated, flags["--gone"].use) == (True, "--better")
    assert flags["--secret-door"].hidden


def test_ranges_end_where_a_flag_was_last_seen(tool: ModuleType) -> None:
    releases = tool.RELEASES
    seen = [True, True, False, True] + [False] * (len(releases) - 5) + [True]
    assert tool.ranges(seen) == [[releases[0], releases[1]], [releases[3], releases[3]], [releases[-1], None]]
    assert tool.ranges([False] * len(releases)) == []


def test_the_whole_run_writes_checks_and_fails_with_its_exit_codes(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in tool.RELEASES:
        wheel(tmp_path, version, fields=version == tool.RELEASES[-1])
    output = tmp_path / "table.json"
    arguments = ["--wheels", str(tmp_path), "--output", str(output)]
    assert tool.main([*arguments, "--check"]) == 1
    assert tool.main(arguments) == 0
    assert tool.main([*arguments, "--check"]) == 0
    data = json.loads(output.read_text(encoding="utf-8"))
    assert data["flags"]["--tp-size"] == {
        "in": [["0.5.23", None]],
        "takes": "value",
        "alias_of": "--tensor-parallel-size",
    }
    assert data["flags"]["--old"]["use"] == "--new"
    assert f"[13/13] {tool.RELEASES[-1]}" in capsys.readouterr().out
    text = tmp_path / "help"
    text.write_text("options:\n  --trust     x\n  --other X, --another X\n", encoding="utf-8")
    assert tool.main([*arguments, "--help-text", str(text)]) == 1
    assert "in --help, not read from the wheel: --another" in capsys.readouterr().out


def test_a_wheel_without_flags_or_a_broken_one_is_an_error(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path, tool.RELEASES[0], calls="x = 1\n")
    assert tool.main(["--wheels", str(tmp_path)]) == 2
    assert "has their declaration changed?" in capsys.readouterr().err
    (tmp_path / f"sglang-{tool.RELEASES[0]}-py3-none-any.whl").write_bytes(b"not a zip")
    assert tool.main(["--wheels", str(tmp_path)]) == 2
