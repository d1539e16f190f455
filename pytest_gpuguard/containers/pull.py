"""Images for ``gpuguard fetch``: which of them are here, and pulling the others, before any claim runs.

A tag that is here is not pulled again: it may have moved, and a stack must not change because somebody looked.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import click

from ..facts.choice import parse_stack
from .client import ContainerError, client_of, image_facts
from .image import parse_reference


def fetch_images(stacks: Sequence[str], only_list: bool) -> bool:
    """Whether all images of these stacks (``NAME=docker:IMAGE``) are here now. Raises click.UsageError."""
    images: dict[str, tuple[str, str]] = {}
    for text in stacks:
        try:
            name, reference = parse_stack(text)
            found = parse_reference(reference)
        except ValueError as error:
            raise click.UsageError(f"--stack {text}: {error}") from None
        if images.setdefault(name, found) != found:
            raise click.UsageError(f"--stack {text}: there are two stacks called {name!r}")
    width = max(map(len, images))
    missing = 0
    for name, (engine, image) in images.items():
        try:
            here = image_facts(engine, image) is not None
            if not here and not only_list:
                click.echo(f"{name:<{width}}  fetching    {engine}:{image}")
                subprocess.run([client_of(engine), "pull", image], stdin=subprocess.DEVNULL, check=False)
                here = image_facts(engine, image) is not None
        except ContainerError as error:
            click.echo(f"{name:<{width}}  failed      {engine}:{image}: {error}", err=True)
            missing += 1
            continue
        state = "there" if here else "missing" if only_list else "failed"
        click.echo(f"{name:<{width}}  {state:<10}  {engine}:{image}", err=state == "failed")
        missing += not here
    return not missing
