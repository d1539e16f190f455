"""End the container of one boot, whatever state it is in, and remove it. A file to run, and two functions.

Standard library only, Python 3.8 syntax: the warden runs it with the host's own python. It must never stop a
container that does not carry the label of this boot, whatever the file with the id says.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

LABEL = "gpuguard.lease"
#: One question to the engine; its end of a container, which may wait for a driver; all of it.
ASK_S = 10.0
END_S = 15.0
WHOLE_S = 25.0
#: How long what a killed client had asked for may take to appear, where it has written no id.
APPEAR_S = 3.0
#: How engines say that there is no such container. Not "no such" alone: so ends also "no such file", of their socket.
ABSENT = ("no such container", "no such object", "no container with")


def call(command: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """Run a client of the engine: status, stdout, stderr. Status 124 when it hangs: it is killed then."""
    try:
        client = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return 127, "", f"{command[0]}: {error.strerror}"
    try:
        out, err = client.communicate(timeout=max(0.1, seconds))
    except subprocess.TimeoutExpired:
        kill(client)
        return 124, "", f"{' '.join(command[:3])} did not answer within {seconds:g} s"
    except BaseException:
        kill(client)
        raise
    return client.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace").strip()


def kill(client: subprocess.Popen[Any]) -> None:
    """SIGKILL a client that leads a session of its own, and what it has started; waits a second at most."""
    try:
        os.killpg(client.pid, signal.SIGKILL)
        client.wait(1.0)
    except (OSError, subprocess.TimeoutExpired):
        pass  # gone already, or stuck in the kernel
    for pipe in (client.stdin, client.stdout, client.stderr):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                pass


def inspect(engine: str, container: str, seconds: float = ASK_S) -> tuple[dict[str, Any] | None, str]:
    """What the engine says of a container; or None and why: "" where it says that there is none."""
    code, out, err = call([engine, "inspect", "--type", "container", container], seconds)
    if code != 0:
        low = err.lower()
        return None, "" if any(one in low for one in ABSENT) else err or f"status {code}"
    try:
        found = json.loads(out)[0]
    except (ValueError, LookupError):
        return None, "its answer is no JSON"
    return (found, "") if isinstance(found, dict) else (None, "its answer is no object")


def id_in(cidfile: str) -> str | None:
    """The id in a cidfile; None while it is not there, or not whole."""
    try:
        with open(cidfile, encoding="ascii", errors="replace") as file:
            found = file.read(200).strip()
    except OSError:
        return None
    return found if len(found) == 64 and all(letter in "0123456789abcdef" for letter in found) else None


def is_ours(facts: dict[str, Any], lease: str) -> bool:
    """Whether a container carries the label of this boot."""
    labels = (facts.get("Config") or {}).get("Labels") or {}
    return bool(lease) and labels.get(LABEL) == lease


def ours(engine: str, lease: str, seconds: float = ASK_S) -> tuple[list[str], str]:
    """Ids of the containers with the label of this boot, in whatever state, and what could not be asked.

    Not by the cidfile alone: a client that was killed early has written none, and may have made a container.
    """
    words = ["ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={lease}"]
    code, out, err = call([engine, *words], seconds)
    return ([], err or f"status {code}") if code != 0 else (out.split(), "")


def remove_words(engine: str) -> list[str]:
    """SIGKILL at once, and remove: podman would wait ten seconds for an answer to SIGTERM first."""
    return ["rm", "--force", "--volumes", *(["--time", "0"] if os.path.basename(engine) == "podman" else [])]


def end(engine: str, cidfile: str, lease: str, whole_s: float = WHOLE_S) -> str | None:
    """SIGKILL and remove what is ours, again and again until nothing is left: None, or what is left and why."""
    began = time.monotonic()
    until = began + whole_s
    seen = False
    while True:
        found, trouble = ours(engine, lease, min(ASK_S, max(1.0, until - time.monotonic())))
        for one in found:
            seen = True
            left = until - time.monotonic()
            code, _, err = call([engine, *remove_words(engine), one], min(END_S, max(1.0, left)))
            if code != 0:
                trouble = err or f"status {code}"
        named = id_in(cidfile)
        # What a killed client had asked for may still appear: where no id was written, look for some time.
        over = named is not None or seen or time.monotonic() - began >= APPEAR_S
        if not trouble and (named in found if found else over):
            return None
        if time.monotonic() >= until:
            return f"container {', '.join(found) or f'with the label {LABEL}={lease}'}: {trouble or 'still there'}"
        time.sleep(0.5 if trouble else 0.1)


def clear(cidfile: str) -> None:
    """Remove the folder of a boot that is over: the cidfile's, when there is nothing else of others in it."""
    folder = os.path.dirname(cidfile)
    for name in (os.path.basename(cidfile), "state.json"):
        try:
            os.unlink(os.path.join(folder, name))
        except OSError:
            pass
    try:
        os.rmdir(folder)
    except OSError:
        pass


def main(arguments: Sequence[str]) -> int:
    """0 when nothing of ours is left, else 1 and the reason on stderr, for the boot's log."""
    parser = argparse.ArgumentParser(prog="container-end")
    for name in ("--engine", "--cidfile", "--lease"):
        parser.add_argument(name, required=True)
    options = parser.parse_args(arguments)
    left = end(options.engine, options.cidfile, options.lease)
    if left is not None:
        sys.stderr.write(f"gpuguard: a container could not be ended: {left}. End it by hand: {options.engine} rm -f\n")
        return 1
    clear(options.cidfile)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
