"""``gpuguard fetch`` against a hub on this machine: what it downloads, what it leaves alone, and what it says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_gpuguard.facts.models import ModelMissing, ModelsFileError, find_model, read_models

from .gpuguard_command import Done, ran
from .hub import REVISION, Hub, serve

PACKAGE = Path(__file__).parents[1] / "pytest_gpuguard"
WEIGHTS = bytes(range(256)) * 400
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
REPOS = {
    "org/small": {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": WEIGHTS},
    "org/large": {
        "config.json": CONFIG,
        "model.safetensors.index.json": INDEX,
        "model-1.safetensors": WEIGHTS,
        "model-2.safetensors": WEIGHTS + b"x",
    },
}
needs_hub = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed"
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve({name: dict(files) for name, files in REPOS.items()}) as running:
        yield running


@pytest.fixture
def models(tmp_path: Path) -> Path:
    file = tmp_path / "models.toml"
    file.write_text('[models]\nsmall = "org/small"\nlarge = "org/large"\n')
    return file


def fetch(hub: Hub | None, cache: Path, *arguments: str | Path, **env: str) -> Done:
    """The command in a process of its own, which sees this hub and this cache only."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    where = hub.url if hub is not None else "http://127.0.0.1:9"
    extra = {"HF_ENDPOINT": where, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return ran("fetch", *arguments, env={**kept, **extra, **env}, cwd=str(cache.parent))


@needs_hub
def test_models_are_downloaded_once_and_then_there(hub: Hub, models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = fetch(hub, cache, "--models", models)
    assert first.code == 0, first.err
    assert re.search(r"^small +there +org/small \(102\.4 kB\)$", first.out, re.MULTILINE)
    assert re.search(r"^large +there +org/large", first.out, re.MULTILINE)
    snapshot = cache / "models--org--small" / "snapshots" / REVISION
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert find_model("small", read_models(models), {"HF_HUB_CACHE": str(cache)}).folder == snapshot
    before = len(hub.asked)
    assert fetch(hub, cache, "--models", models).code == 0
    assert len(hub.asked) == before, "what is there is not asked for"


@needs_hub
def test_names_and_hub_ids_choose(hub: Hub, models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fetch(hub, cache, "large", "--models", models).code == 0
    assert not (cache / "models--org--small").exists()
    by_id = fetch(hub, cache, "org/small")
    assert by_id.code == 0, "a hub id needs no file"
    assert (cache / "models--org--small").exists()


@needs_hub
def test_a_broken_download_is_told_and_goes_on_where_it_ended(hub: Hub, models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    hub.breaks.add("model-2.safetensors")
    broken = fetch(hub, cache, "--models", models, HF_HUB_DOWNLOAD_TIMEOUT="2")
    assert broken.code == 1
    assert re.search(r"^large +failed +org/large: ", broken.err, re.MULTILINE)
    assert re.search(r"^small +there", broken.out, re.MULTILINE), "one model does not stop the others"
    listed = fetch(hub, cache, "--list", "--models", models)
    assert listed.code == 1
    assert re.search(
        r"^large +incomplete +org/large \(\d+\.\d kB\): 1 of 2 weight files are missing$", listed.out, re.M
    )
    hub.breaks.clear()
    hub.asked.clear()
    assert fetch(hub, cache, "--models", models).code == 0
    assert hub.downloads == ["model-2.safetensors"]


@needs_hub
def test_the_list_says_what_is_there_and_what_is_missing_with_sizes(hub: Hub, models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fetch(hub, cache, "small", "--models", models).code == 0
    hub.asked.clear()
    done = fetch(hub, cache, "--list", "--models", models)
    assert done.code == 1, "something is missing"
    assert done.out.splitlines() == [
        "small  there       org/small (102.4 kB)",
        "large  missing     org/large (204.9 kB)",
    ]
    assert hub.downloads == [], "a list downloads nothing"
    assert fetch(hub, cache, "--list", "small", "--models", models).code == 0


@needs_hub
def test_without_a_network_the_list_still_says_what_is_there(models: Path, tmp_path: Path) -> None:
    done = fetch(None, tmp_path / "cache", "--list", "--models", models)
    assert (done.code, done.out.splitlines()[0]) == (1, "small  missing     org/small")


@needs_hub
def test_without_weights_only_what_a_dummy_load_needs_is_downloaded(hub: Hub, models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fetch(hub, cache, "--without-weights", "--models", models).code == 0
    assert not [name for name in hub.downloads if name.endswith(".safetensors")]
    assert find_model("large", read_models(models), {"HF_HUB_CACHE": str(cache)}).argument == "org/large"
    assert fetch(hub, cache, "--list", "--without-weights", "--models", models).code == 0
    whole = fetch(hub, cache, "--list", "--models", models)
    assert whole.code == 1
    assert re.search(r"^small +incomplete .*: no weights$", whole.out, re.MULTILINE)


@needs_hub
def test_a_model_that_the_hub_does_not_have_fails_in_one_line(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path / "cache", "org/none", "org/small", HF_TOKEN="hf_secretsecretsecret")
    assert done.code == 1
    assert "org/none   failed      org/none: the hub has no such model, or it is private" in done.err
    assert "Traceback" not in done.err
    assert "hf_secret" not in done.out + done.err
    assert re.search(r"^org/small +there", done.out, re.MULTILINE)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_nothing_is_downloaded_where_a_lease_has_set_the_hub_offline(tmp_path: Path, variable: str) -> None:
    done = fetch(None, tmp_path / "cache", "org/small", **{variable: "1"})
    assert done.code == 2
    assert f"{variable} is set" in done.err
    assert "nothing is downloaded in a lease" in done.err


def test_without_huggingface_hub_the_pip_command_is_told(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "huggingface_hub.py").write_text("raise ImportError('blocked')")
    path = os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")])
    done = fetch(None, tmp_path / "cache", "org/small", PYTHONPATH=path)
    assert done.code == 2
    assert "huggingface_hub is not installed here" in done.err
    assert "pip install huggingface_hub" in done.err
    listed = fetch(None, tmp_path / "cache", "--list", "org/small", PYTHONPATH=path)
    assert (listed.code, listed.out) == (1, "org/small  missing     org/small\n")


def test_a_folder_is_looked_at_and_never_downloaded(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "config.json").write_text("{}")
    (here / "model.safetensors").write_bytes(b"x" * 10)
    file = tmp_path / "models.toml"
    file.write_text(f'[models]\nhere = "./here"\ngone = "{tmp_path}/gone"\n')
    done = fetch(None, tmp_path / "cache", "--models", file)
    assert done.code == 1
    assert f"here  there       {here} (12 B)" in done.out
    assert f"gone  missing     {tmp_path}/gone: no such folder" in done.out
    assert fetch(None, tmp_path / "cache", "here", "--models", file).code == 0


def test_a_part_of_a_model_is_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models--org--large" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    def listed(*arguments: str) -> str:
        return fetch(None, tmp_path / "cache", "--list", "org/large", *arguments).out

    (folder / "model-00002-of-00003.safetensors").symlink_to("../../blobs/that-is-gone")
    assert "incomplete  org/large: 3 of 3 weight files are missing" in listed()
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"x")
    assert "incomplete  org/large: 2 of 3 weight files are missing" in listed()
    assert "there       org/large" in listed("--without-weights")
    for file in folder.glob("model-*"):
        file.unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/that-is-gone")
    assert "incomplete  org/large: no weights" in listed()


def test_a_name_of_the_models_toml_may_look_like_a_hub_id(tmp_path: Path) -> None:
    cache, file = tmp_path / "cache", tmp_path / "models.toml"
    file.write_text(f'[models]\n"org/mine" = "{tmp_path}/mine"\n')
    assert fetch(None, cache, "--list", "org/mine").out.startswith(f"org/mine  missing     {tmp_path}/mine: no such")
    file.write_text("another = 'program'\n")
    assert fetch(None, cache, "--list", "org/mine").out.startswith("org/mine  missing     org/mine")


def test_the_models_toml_is_found_here_or_in_a_suite(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert "no models.toml here" in fetch(None, cache).err
    suite = tmp_path / "suites" / "one"
    suite.mkdir(parents=True)
    (suite / "models.toml").write_text('[models]\na = "org/a"\n')
    assert fetch(None, cache, "--list").out.startswith("a  missing     org/a")
    (tmp_path / "suites" / "two").mkdir()
    (tmp_path / "suites" / "two" / "models.toml").write_text('[models]\nb = "org/b"\n')
    assert "several files name models" in fetch(None, cache, "--list").err
    (tmp_path / "models.toml").write_text('[models]\nc = "org/c"\n')
    assert fetch(None, cache, "--list").out.startswith("c  missing     org/c")


def test_an_unknown_name_is_a_mistake_that_names_the_known_ones(models: Path, tmp_path: Path) -> None:
    done = fetch(None, tmp_path / "cache", "smal", "--models", models)
    assert done.code == 2
    assert "smal: not in the models.toml, which has large, small" in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models", "not TOML"),
        ("", r"write one table \[models\]"),
        ("models = 3", r"write one table \[models\]"),
        ('[models]\na = "x/y"\n[more]\n', r"write one table \[models\]"),
        ("[models]\na = 3", r"a = 3: give a folder or a hub id in quotes"),
        ('[models]\na = " "', "give a folder or a hub id in quotes"),
        ('[models]\na = "qwen"', r"neither a hub id \(org/name\) nor a folder"),
        ('[models]\na = "https://x.y/org/name"', r"neither a hub id"),
    ],
)
def test_a_wrong_models_toml_is_told_with_its_cure(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ModelsFileError, match=said) as raised:
        read_models(file)
    assert str(file) in str(raised.value)
    done = fetch(None, tmp_path / "cache", "--models", file)
    assert done.code == 2
    assert "Traceback" not in done.err


def test_a_models_toml_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "No such file" in fetch(None, tmp_path / "cache", "--models", tmp_path / "none.toml").err


def test_folders_in_a_models_toml_start_at_its_own(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models]\na = "./x"\nb = "~/y"\nc = "/z"\nd = "Org/N.a-m_e"\n')
    assert read_models(file) == {
        "a": str(tmp_path / "x"),
        "b": os.path.expanduser("~/y"),
        "c": "/z",
        "d": "Org/N.a-m_e",
    }


def test_a_missing_model_tells_the_path_looked_for_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing) as raised:
        find_model("small", {"small": "org/small"}, {"HF_HUB_CACHE": str(tmp_path)})
    assert str(raised.value) == (
        f"model 'small' (org/small) is not in the hub cache: looked for {tmp_path}/models--org--small/snapshots/*/"
        f"config.json; download it beforehand with 'gpuguard fetch org/small', nothing is fetched in a lease"
    )


def test_nothing_that_runs_claims_can_download() -> None:
    """Only the command imports the hub's client."""
    users = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"huggingface_hub|cli_fetch|snapshot_download", path.read_text(encoding="utf-8"))
    ]
    assert sorted(users) == ["cli.py", "cli_fetch.py"]
