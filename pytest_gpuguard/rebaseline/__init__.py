"""Proposes how a claim's source should read after what a run saw, as a patch. It must never change a file itself."""

from .diff import patch
from .propose import propose
from .values import Proposal, Refused

__all__ = ["Proposal", "Refused", "patch", "propose"]
