"""The tables of the ledger, as this version writes them. A change here must never go without a step in ``migrate``."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    false,
)

from .rows import VERSION as VERSION

metadata: Final = MetaData()

# Byte order on every database, so that "newest" is the same run on all of them.
_NAME: Final = Text().with_variant(Text(collation="C"), "postgresql")
_NUMBER: Final = BigInteger().with_variant(Integer, "sqlite")

meta: Final = Table(
    "gpuguard_meta",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("value", Text, nullable=False),
)

runs: Final = Table(
    "gpuguard_runs",
    metadata,
    Column("id", _NAME, primary_key=True),
    Column("started", Double, nullable=False),
    Column("ended", Double),
    Column("host", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("rig", Text, nullable=False),
    Column("tool", Text, nullable=False),
    Column("suite", Text),
    Column("stacks", Text, nullable=False),
    Index("gpuguard_runs_by_start", "started", "id"),
)

#: Flat components of a stack and its rig, once each. ``digest`` is of the components' JSON.
fingerprints: Final = Table(
    "gpuguard_fingerprints",
    metadata,
    Column("digest", _NAME, primary_key=True),
    Column("components", Text, nullable=False),
)

#: What a verdict can be compared with: a claim on a stack, on kinds of cards, of one kind.
subjects: Final = Table(
    "gpuguard_subjects",
    metadata,
    Column("id", _NUMBER, primary_key=True),
    Column("digest", _NAME, nullable=False, unique=True),
    Column("claim", _NAME, nullable=False),
    Column("stack", _NAME, nullable=False),
    Column("kind", Text, nullable=False),
    Column("cards", Text, nullable=False),
    # A hash takes names of any length; PostgreSQL's ordered index stops at 2.7 kB.
    Index("gpuguard_subjects_by_claim", "claim", postgresql_using="hash"),
)

#: One row per run, claim, stack and expectation: ``key`` is the digest of the latter three. ``counts``: it decides, and
#: says whether the claim holds. ``began`` is the run's start, so that one index answers "the last one before".
judgements: Final = Table(
    "gpuguard_judgements",
    metadata,
    Column("id", _NUMBER, primary_key=True),
    Column("run", _NAME, nullable=False),
    Column("key", _NAME, nullable=False),
    Column("subject", _NUMBER, nullable=False),
    Column("counts", SmallInteger, nullable=False),
    Column("began", Double, nullable=False),
    Column("judged", Double, nullable=False),
    Column("expectation", Text, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("fact", Text, nullable=False),
    Column("reason", Text),
    Column("nodeid", Text, nullable=False),
    Column("decides", Boolean, nullable=False),
    Column("fingerprint", _NAME, nullable=False),
    Column("hearsay", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("run", "key", name="gpuguard_judgements_once"),
    Index("gpuguard_judgements_by_subject", "subject", "counts", "began", "run", "judged", "key"),
)

#: The payload of a claim in a run: ``case`` is the digest of claim and stack.
evidence: Final = Table(
    "gpuguard_evidence",
    metadata,
    Column("run", _NAME, primary_key=True),
    Column("case", _NAME, primary_key=True),
    Column("judged", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

#: ``digest`` is of both names: a renaming that was undone by a later one is kept, for the order of all decides.
aliases: Final = Table(
    "gpuguard_aliases",
    metadata,
    Column("digest", _NAME, primary_key=True),
    Column("old", Text, nullable=False),
    Column("new", Text, nullable=False),
    Column("since", Double, nullable=False),
)

#: Of this machine only: never exported.
notes: Final = Table(
    "gpuguard_notes",
    metadata,
    Column("digest", _NAME, primary_key=True),
    Column("name", Text, nullable=False),
    Column("data", Text, nullable=False),
)
