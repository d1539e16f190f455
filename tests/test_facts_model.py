"""Which model a folder holds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from pytest_gpuguard.facts.stack import model_facts
from tests.needs import need_tool

CONFIG = {"model_type": "qwen3", "hidden_size": 16, "architectures": ["Qwen3ForCausalLM"]}


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    return folder


def test_the_hash_is_of_the_content_and_not_of_its_layout(tmp_path: Path) -> None:
    one = write(tmp_path / "one", json.dumps(CONFIG))
    other = write(tmp_path / "other", json.dumps(dict(reversed(CONFIG.items())), indent=4))
    changed = write(tmp_path / "changed", json.dumps({**CONFIG, "hidden_size": 17}))
    assert model_facts(one) == model_facts(str(other))
    assert model_facts(one)["revision"] is None
    digest = model_facts(one)["config_sha256"]
    assert digest is not None
    assert len(digest) == 64
    assert digest != model_facts(changed)["config_sha256"]


def test_a_snapshot_of_the_hub_cache_is_its_revision(tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = write(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / revision, json.dumps(CONFIG))
    (tmp_path / "link").symlink_to(snapshot)
    assert model_facts(snapshot)["revision"] == revision
    assert model_facts(tmp_path / "link")["revision"] == revision
    assert model_facts(write(tmp_path / "snapshots" / "mine", "{}"))["revision"] is None


def test_a_git_checkout_is_its_commit_but_not_one_further_up(tmp_path: Path) -> None:
    git = need_tool("git")
    model = write(tmp_path / "model", json.dumps(CONFIG))
    environment = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]

    def run(*arguments: str) -> str:
        command = [git, "-C", str(model), *environment, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "-q")
    run("add", ".")
    run("commit", "-q", "-m", "weights")
    commit = run("rev-parse", "HEAD")
    assert model_facts(model)["revision"] == commit
    run("pack-refs", "--all")
    assert model_facts(model)["revision"] == commit
    run("checkout", "-q", "--detach")
    assert model_facts(model)["revision"] == commit
    run("worktree", "add", "-q", "-b", "tree", str(tmp_path / "tree"))
    assert model_facts(tmp_path / "tree")["revision"] == commit
    assert model_facts(write(model / "inner", "{}"))["revision"] is None


def test_what_cannot_be_told_is_none(tmp_path: Path) -> None:
    nothing = {"revision": None, "config_sha256": None}
    assert model_facts(tmp_path / "absent") == nothing
    assert model_facts(write(tmp_path / "broken", "{not json")) == nothing
    (tmp_path / "broken" / ".git").write_text("gitdir: nowhere")
    assert model_facts(tmp_path / "broken") == nothing
