#!/usr/bin/env python3
"""Make the table of SGLang's command-line flags by release, from the released wheels.

Each wheel is downloaded with pip (``--no-deps``), opened as a zip file and read as a syntax tree: nothing of it is
imported or run, and only facts leave it (flag names, aliases, arity, deprecation). Up to 0.5.12 a flag is an
``add_argument`` call; from 0.5.15 most are ``A[type, Arg(...)]`` fields (from 0.5.20 in ``arg_groups/fields``).

Usage::

    python tools/flags_by_release.py                     # all releases → pytest_gpuguard/facts/sglang_flags.json
    python tools/flags_by_release.py --wheels DIR        # keep the wheels there, and reuse those that are there
    python tools/flags_by_release.py --check             # write nothing; exit 1 if the checked-in table differs
    python tools/flags_by_release.py --help-text FILE --help-release 0.5.23   # compare one release with a real --help

Exit status: 0 done, 1 ``--check`` or ``--help-text`` found a difference, 2 a wheel could not be had or read.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: The releases of the table, oldest first. A flag's range ends name these, so the true change may lie between two.
RELEASES = (
    "0.4.6",
    "0.4.10",
    "0.5.3",
    "0.5.5",
    "0.5.6",
    "0.5.7",
    "0.5.10",
    "0.5.12",
    "0.5.15",
    "0.5.16",
    "0.5.18",
    "0.5.20",
    "0.5.23",
)
TABLE = Path(__file__).resolve().parent.parent / "pytest_gpuguard" / "facts" / "sglang_flags.json"
SERVER_ARGS = "sglang/srt/server_args.py"
FIELDS = re.compile(r"^sglang/srt/arg_groups/fields/\w+\.py$")
_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")


class SourceError(Exception):
    """A wheel is missing, or holds no flags where this tool looks for them."""


@dataclass
class Flag:
    """One option string in one release. ``takes``: nothing, value, optional (``nargs="?"``) or list.

    ``hidden`` flags are accepted but not in ``--help`` (``help=argparse.SUPPRESS``).
    """

    takes: str
    alias_of: str | None = None
    deprecated: bool = False
    use: str | None = None
    hidden: bool = False


@dataclass
class Release:
    """All option strings of one release, and how many calls could not be read (computed names)."""

    flags: dict[str, Flag] = field(default_factory=dict)
    unread: int = 0


def wheel_of(version: str, folder: Path) -> Path:
    """The wheel of a release, from the folder or through pip; raises SourceError."""
    names = [version, *(f"{version}.post{n}" for n in range(1, 6))]
    for name in names:
        for found in sorted(folder.glob(f"**/sglang-{name}-*.whl")):
            return found
    for name in names:
        # The wheels of some releases are built for one interpreter; any will do, they are only read.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", "3.12", "--dest", str(folder), f"sglang=={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for found in sorted(folder.glob(f"sglang-{name}-*.whl")):
            return found
        if "No matching distribution" not in done.stderr:
            raise SourceError(f"sglang {name}: pip download failed: {done.stderr.strip()[-400:]}")
    raise SourceError(f"sglang {version}: no wheel, and no post-release of it")


def read_release(wheel: Path) -> Release:
    """The flags of one wheel; raises SourceError when it holds implausibly few."""
    release = Release()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name == SERVER_ARGS or FIELDS.match(name):
                    tree = ast.parse(archive.read(name).decode("utf-8"), filename=name)
                    _read_tree(tree, release)
    except (OSError, zipfile.BadZipFile, SyntaxError) as error:
        raise SourceError(f"{wheel.name}: {error}") from error
    if len(release.flags) < 50:
        raise SourceError(f"{wheel.name}: only {len(release.flags)} flags found; has their declaration changed?")
    return release


def _read_tree(tree: ast.Module, release: Release) -> None:
    release.flags.setdefault("-h", Flag("nothing", "--help"))
    release.flags.setdefault("--help", Flag("nothing"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            _read_call(node, release)
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    _read_field(statement.target.id, statement.annotation, release)


def _read_call(call: ast.Call, release: Release) -> None:
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    options = [name for name in names if name.startswith("-")]
    if not options:
        if not names:
            release.unread += 1
        return
    keywords = {word.arg: word.value for word in call.keywords if word.arg}
    _add(release, options, _takes(keywords, boolean=False), keywords)


def _read_field(name: str, annotation: ast.expr, release: Release) -> None:
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name)):
        return
    if annotation.value.id not in ("A", "Annotated") or not isinstance(annotation.slice, ast.Tuple):
        return
    kind, *notes = annotation.slice.elts
    heads = {part.id for part in _type_heads(kind) if isinstance(part, ast.Name)}
    boolean, listed = "bool" in heads, bool(heads & {"List", "list"})
    for note in notes:
        if isinstance(note, ast.Call) and isinstance(note.func, ast.Name) and note.func.id == "Arg":
            keywords = {word.arg: word.value for word in note.keywords if word.arg}
            if _constant(keywords.get("no_cli")) is True:
                return
            main = _constant(keywords.get("cli_name"))
            options = [main if isinstance(main, str) else _option(name)]
            aliases = keywords.get("aliases")
            if isinstance(aliases, (ast.List, ast.Tuple)):
                options += [word for word in map(_constant, aliases.elts) if isinstance(word, str)]
            listed = listed and "type_parser" not in keywords
            _add(release, options, _takes(keywords, boolean=boolean, listed=listed), keywords)
            return
        if isinstance(note, (ast.Constant, ast.JoinedStr, ast.BinOp)):
            takes = "nothing" if boolean else "list" if listed else "value"
            _add(release, [_option(name)], takes, {"help": note})
            return


def _type_heads(kind: ast.expr) -> Iterator[ast.expr]:
    """The outer names of ``Optional[List[X]]`` and ``List[X] | None``, not those of the element type."""
    if isinstance(kind, ast.Subscript):
        yield kind.value
        if isinstance(kind.value, ast.Name) and kind.value.id == "Optional":
            yield from _type_heads(kind.slice)
    elif isinstance(kind, ast.BinOp):
        yield from _type_heads(kind.left)
        yield from _type_heads(kind.right)
    else:
        yield kind


def _takes(keywords: dict[str, ast.expr], *, boolean: bool, listed: bool = False) -> str:
    action = keywords.get("action")
    extra = keywords.get("action_kwargs")
    if isinstance(extra, ast.Dict):
        keywords = keywords | {
            key.value: value
            for key, value in zip(extra.keys, extra.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }
    named = (
        _constant(action) if isinstance(action, ast.Constant) else getattr(action, "attr", getattr(action, "id", ""))
    )
    nargs = _constant(keywords.get("nargs"))
    if nargs == 0 or named in ("store_true", "store_false", "store_const", "version", "help", "BooleanOptionalAction"):
        return "nothing"
    if nargs in ("*", "+") or (isinstance(nargs, int) and nargs > 1):
        return "list"
    if nargs == "?":
        return "optional"
    if isinstance(named, str) and named.startswith("Deprecated") and "Alias" not in named and "nargs" not in keywords:
        return "nothing"
    if boolean and action is None:
        return "nothing"
    if listed and action is None:
        return "list"
    return "value"


def _add(release: Release, options: list[str], takes: str, keywords: dict[str, ast.expr]) -> None:
    options.sort(key=lambda option: not option.startswith("--"))
    action = keywords.get("action")
    named = getattr(action, "attr", getattr(action, "id", ""))
    note = _text(keywords.get("help"))
    deprecated = named.startswith("Deprecated") or bool(re.match(r"\W*(note: )?(\S+ is )?deprecated", note, re.I))
    use = _text(keywords.get("new_flag")) or None
    if use is None and deprecated:
        named_flags = [flag for flag in _FLAG.findall(note) if flag not in options]
        use = named_flags[0] if named_flags else None
    use = use.replace("<dp-size>", "N") if use else None
    help_node = keywords.get("help")
    hidden = isinstance(help_node, ast.Attribute) and help_node.attr == "SUPPRESS"
    if named == "BooleanOptionalAction":
        options += ["--no-" + option[2:] for option in options if option.startswith("--")]
    for option in options:
        alias = options[0] if option != options[0] and not option.startswith("--no-") else None
        release.flags[option] = Flag(takes, alias, deprecated, use, hidden)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _text(node: ast.expr | None) -> str:
    if node is None:
        return ""
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
    return "".join(parts)


def ranges(present: list[bool]) -> list[list[str | None]]:
    """``[first, last]`` for each run of releases; last is null when the newest release still has the flag."""
    found: list[list[str | None]] = []
    for index, here in enumerate(present):
        if here and not (index and present[index - 1]):
            found.append([RELEASES[index], None])
        elif not here and index and present[index - 1]:
            found[-1][1] = RELEASES[index - 1]
    return found


def table(releases: dict[str, Release]) -> dict[str, object]:
    """The whole table, ready for JSON: flag → where it exists, what it takes, alias, deprecation, successor."""
    flags: dict[str, dict[str, object]] = {}
    for name in sorted({flag for release in releases.values() for flag in release.flags}):
        holders = [(version, releases[version].flags.get(name)) for version in RELEASES]
        known = [(version, flag) for version, flag in holders if flag is not None]
        entry: dict[str, object] = {
            "in": ranges([flag is not None for _, flag in holders]),
            "takes": known[-1][1].takes,
        }
        if known[-1][1].alias_of:
            entry["alias_of"] = known[-1][1].alias_of
        deprecated = [version for version, flag in known if flag.deprecated]
        if deprecated and known[-1][1].deprecated:
            entry["deprecated"] = deprecated[0]
        successors = [flag.use for _, flag in known if flag.use]
        if successors:
            entry["use"] = successors[-1]
        if known[-1][1].hidden:
            entry["hidden"] = True
        earlier = {flag.takes for _, flag in known} - {known[-1][1].takes}
        if earlier:
            entry["took"] = sorted(earlier)
        flags[name] = entry
    return {"engine": "sglang", "made_by": "tools/flags_by_release.py", "releases": list(RELEASES), "flags": flags}


def dump(data: dict[str, object]) -> str:
    """JSON with one flag a line: small, and readable in a diff."""
    flags = data["flags"]
    assert isinstance(flags, dict)
    head = {key: value for key, value in data.items() if key != "flags"}
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in flags.items()]
    return json.dumps(head)[:-1] + ', "flags": {\n' + ",\n".join(lines) + "\n}}\n"


def compare_help(text: str, release: Release) -> list[str]:
    """Differences between a real ``--help`` text and what was read from the wheel."""
    real = set(re.findall(r"(?m)^  (-{1,2}[A-Za-z0-9][\w-]*)", text))
    real |= set(re.findall(r"(?m)^  -.*?, (--[a-z0-9][\w-]*)", text))
    real |= {
        flag for line in re.findall(r"(?m)^  (-.*)$", text) for flag in re.findall(r"(?:^|, )(-{1,2}[\w-]+)", line)
    }
    read = {name for name, flag in release.flags.items() if not flag.hidden}
    gone = [f"read from the wheel, not in --help: {flag}" for flag in sorted(read - real)]
    return gone + [f"in --help, not read from the wheel: {flag}" for flag in sorted(real - read)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder for the wheels (default: a temporary one)")
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--check", action="store_true", help="compare with --output instead of writing it")
    parser.add_argument("--help-text", type=Path, help="a file with the real --help of --help-release")
    parser.add_argument("--help-release", default=RELEASES[-1], choices=RELEASES)
    options = parser.parse_args(argv)
    releases: dict[str, Release] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.wheels or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for number, version in enumerate(RELEASES, start=1):
            try:
                wheel = wheel_of(version, folder)
                releases[version] = read_release(wheel)
            except SourceError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            found = releases[version]
            note = f", {found.unread} calls with computed names" if found.unread else ""
            print(f"[{number}/{len(RELEASES)}] {version}: {len(found.flags)} option strings ({wheel.name}){note}")
    if options.help_text:
        differences = compare_help(options.help_text.read_text(encoding="utf-8"), releases[options.help_release])
        print("\n".join(differences) or f"{options.help_release}: the wheel and --help agree")
        return 1 if differences else 0
    text = dump(table(releases))
    if options.check:
        same = options.output.exists() and options.output.read_text(encoding="utf-8") == text
        print(f"{options.output}: {'up to date' if same else 'differs: run this tool without --check'}")
        return 0 if same else 1
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: {len(text)} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
