"""Lock folders that others probably do not see are noticed, and those that they do see are not complained of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpuguard.lease import dirs, mounts
from pytest_gpuguard.lease.mounts import Mount, elsewhere, findings, judge, mount_of, mounts_of
from tests.needs import need, need_tool
from tests.trees import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks are for Linux only")

HOST = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
25 22 0:23 / /run rw,nosuid shared:5 - tmpfs tmpfs rw,size=400000k
31 22 0:30 / /home/a\\040b rw - nfs4 server:/export rw
"""
DOCKER = """\
600 500 0:55 / / rw,relatime - overlay overlay rw
610 600 0:23 /lock/gpuguard /run/lock/gpuguard rw,nosuid - tmpfs tmpfs rw
620 600 0:60 / /tmp rw - tmpfs tmpfs rw
"""
SERVICE = """\
700 690 254:1 / / rw - ext4 /dev/vda1 rw
710 700 254:1 /tmp/systemd-private-0a1b-ci.service-XyZ/tmp /tmp rw shared:9 - ext4 /dev/vda1 rw
"""


def found(text: str, folder: str, contained: bool = False) -> list[str]:
    return judge(folder, mount_of(folder, mounts_of(text)), contained)


def test_the_mount_of_a_folder_is_the_innermost_and_latest_one() -> None:
    assert mount_of("/run/lock/gpuguard", mounts_of(HOST)) == Mount("/run", "/", "tmpfs")
    assert mount_of("/runs", mounts_of(HOST)) == Mount("/", "/", "ext4")
    assert mount_of("/home/a b/locks", mounts_of(HOST)) == Mount("/home/a b", "/", "nfs4")
    assert mount_of("/run/x", mounts_of(HOST + "40 25 0:9 / /run rw - ramfs r rw")) == Mount("/run", "/", "ramfs")
    assert mount_of("/x", mounts_of("nonsense\n\n1 2 3")) is None


def test_a_folder_of_the_host_or_one_that_was_mounted_into_the_container_is_fine() -> None:
    assert found(HOST, "/run/lock/gpuguard") == []
    assert found(HOST, "/tmp/gpuguard") == []
    assert found(DOCKER, "/run/lock/gpuguard", contained=True) == []


@pytest.mark.parametrize("folder", ["/tmp/gpuguard", "/run/lock/other"])
def test_a_containers_own_folder_is_told_with_the_option_to_give(folder: str) -> None:
    (line,) = found(DOCKER, folder, contained=True)
    assert f"{folder} is its own" in line
    assert "-v /run/lock/gpuguard:/run/lock/gpuguard" in line


def test_debians_tmpfs_for_locks_may_be_mounted_whole_and_a_pods_own_volume_is_told() -> None:
    debian = DOCKER + "630 600 0:31 / /run/lock rw,nosuid - tmpfs tmpfs rw,size=5120k\n"
    assert found(debian, "/run/lock/other", contained=True) == []
    volume = "/var/lib/kubelet/pods/1-2/volumes/kubernetes.io~empty-dir/locks"
    pod = DOCKER + f"640 600 259:1 {volume} /run/lock/gpuguard rw - ext4 /dev/nvme0n1p1 rw\n"
    assert "is its own" in found(pod, "/run/lock/gpuguard", contained=True)[0]


def test_the_same_folder_of_the_machine_is_recognised_however_it_is_mounted() -> None:
    service = HOST + "900 25 0:23 /lock /run/lock ro,nosuid - tmpfs tmpfs rw\n"  # bound onto itself, as sandboxing does
    assert not elsewhere("/run/lock/gpuguard", mounts_of(service), mounts_of(HOST))
    covered = HOST + "900 22 0:99 / /tmp rw - tmpfs tmpfs rw\n"
    assert elsewhere("/tmp/gpuguard", mounts_of(covered), mounts_of(HOST))
    assert not elsewhere("/run/lock/gpuguard", mounts_of(covered), mounts_of(HOST))
    assert elsewhere("/tmp/gpuguard", mounts_of(SERVICE), mounts_of(HOST))
    assert not elsewhere("/tmp/gpuguard", mounts_of(HOST), [])


OWN_DISK = "22 1 254:1 / / rw,relatime - ext4 /dev/vda rw\n"


@pytest.mark.parametrize(
    ("root", "mark", "host", "cgroups", "contained"),
    [
        (DOCKER, True, False, "0::/", True),  # Docker or Podman with cgroups of their own
        (DOCKER, False, False, "0::/", True),  # a pod
        (DOCKER, False, True, "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-0a.scope", True),  # with hostPID
        (DOCKER, False, True, "0::/", False),  # a live system
        (OWN_DISK, True, True, "0::/", False),  # a virtual machine that was made of a container image
        (OWN_DISK, False, False, "0::/", False),  # a sandbox with pids of its own
        (OWN_DISK, True, False, "0::/", True),  # LXC on a disk of its own
        (OWN_DISK, False, True, "0::/system.slice/docker.service", False),
        ("", False, True, "4:memory:/docker/0123456789ab", True),
    ],
)
def test_containers_are_told_from_machines(root: str, mark: bool, host: bool, cgroups: str, contained: bool) -> None:
    said = mounts.in_container(mounts_of(root), lambda path: mark, lambda: host, lambda: cgroups)
    assert said is contained


def test_a_private_tmp_and_a_network_disk_are_told() -> None:
    (line,) = found(SERVICE, "/tmp/gpuguard")
    assert "private /tmp" in line
    (line,) = found(HOST, "/home/a b/locks")
    assert "nfs4" in line
    assert dirs.ENV in line


def test_who_chooses_another_folder_is_told_of_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dirs.ENV, str(tmp_path))
    monkeypatch.setattr(mounts, "in_container", lambda mounts: False)
    monkeypatch.setattr(mounts, "DEFAULTS", (str(tmp_path), "/tmp/gpuguard"))
    assert findings(tmp_path) == []
    other = tmp_path / "other"
    other.mkdir()
    (line,) = findings(other)
    assert f"{tmp_path} is there too" in line


def test_an_ordinary_user_who_owns_the_folder_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(os.geteuid() == 0, "only root can give a folder to another user")
    monkeypatch.delenv(dirs.ENV, raising=False)
    monkeypatch.setattr(mounts, "in_container", lambda mounts: False)
    assert findings(tmp_path) == []
    os.chown(tmp_path, 65534, 65534)
    (line,) = findings(tmp_path)
    assert line == f"{tmp_path} belongs to uid 65534, who can remove locks: let root make it (mode 1777)"
    monkeypatch.setattr(dirs, "_all_uids", lambda: False)
    assert findings(tmp_path) == []


def test_a_folder_in_a_mount_namespace_of_our_own_is_noticed(tmp_path: Path) -> None:
    need(os.geteuid() == 0, "only root can make a mount namespace")
    unshare = need_tool("unshare")
    code = f"""
from pathlib import Path
from pytest_gpuguard.lease.mounts import findings
print(findings(Path({str(tmp_path)!r})))
"""
    script = 'mount -t tmpfs none "$1" && exec "$2" -c "$3"'
    command = [unshare, "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, code]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True)
    need(done.returncode == 0, f"no mount namespace can be made here: {done.stderr}")
    assert "do not see who has which GPU" in done.stdout
