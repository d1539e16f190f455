"""A ledger of version 1, as that version made it: never to be edited, for such ledgers are still about."""

from __future__ import annotations

from sqlalchemy import create_engine, text

TABLES = """
CREATE TABLE gpuguard_meta (name {name} NOT NULL, value TEXT NOT NULL, PRIMARY KEY (name));
CREATE TABLE gpuguard_runs (id {name} NOT NULL, started {double} NOT NULL, ended {double}, host TEXT NOT NULL,
    kind TEXT NOT NULL, rig TEXT NOT NULL, tool TEXT NOT NULL, suite TEXT, stacks TEXT NOT NULL, PRIMARY KEY (id));
CREATE INDEX gpuguard_runs_by_start ON gpuguard_runs (started, id);
CREATE TABLE gpuguard_fingerprints (digest {name} NOT NULL, components TEXT NOT NULL, PRIMARY KEY (digest));
CREATE TABLE gpuguard_subjects (id {serial} NOT NULL, digest {name} NOT NULL, claim {name} NOT NULL,
    stack {name} NOT NULL, kind TEXT NOT NULL, cards TEXT NOT NULL, PRIMARY KEY (id), UNIQUE (digest));
CREATE INDEX gpuguard_subjects_by_claim ON gpuguard_subjects {hash} (claim);
CREATE TABLE gpuguard_judgements (id {serial} NOT NULL, run {name} NOT NULL, key {name} NOT NULL,
    subject {number} NOT NULL, counts SMALLINT NOT NULL, began {double} NOT NULL, judged {double} NOT NULL,
    expectation TEXT NOT NULL, verdict TEXT NOT NULL, outcome TEXT NOT NULL, fact TEXT NOT NULL, reason TEXT,
    nodeid TEXT NOT NULL, decides BOOLEAN NOT NULL, fingerprint {name} NOT NULL, PRIMARY KEY (id),
    CONSTRAINT gpuguard_judgements_once UNIQUE (run, key));
CREATE INDEX gpuguard_judgements_by_subject ON gpuguard_judgements (subject, counts, began, run, judged, key);
CREATE TABLE gpuguard_evidence (run {name} NOT NULL, "case" {name} NOT NULL, judged {double} NOT NULL,
    data {bytes} NOT NULL, PRIMARY KEY (run, "case"));
CREATE TABLE gpuguard_aliases (digest {name} NOT NULL, old TEXT NOT NULL, new TEXT NOT NULL, since {double} NOT NULL,
    PRIMARY KEY (digest));
INSERT INTO gpuguard_meta VALUES ('version', '1');
INSERT INTO gpuguard_runs VALUES ('run-000', 1000000000, NULL, 'host', 'verified', '1x card', '0.1', NULL, '["new"]');
INSERT INTO gpuguard_fingerprints VALUES ('f', '{{"torch":"2.9.0"}}');
INSERT INTO gpuguard_subjects VALUES (7, 's', 'a claim', 'new', 'verified', '["a card"]');
INSERT INTO gpuguard_judgements VALUES (9, 'run-000', 'k', 7, 1, 1000000000, 1000000060, 'fits()', 'HOLDS', 'ready',
    'as it was', NULL, 'a claim[new]', {true}, 'f');
"""

SQLITE = {
    "name": "TEXT", "double": "DOUBLE", "serial": "INTEGER", "number": "INTEGER", "bytes": "BLOB", "hash": "",
    "true": "1",
}  # fmt: skip
POSTGRESQL = {
    "name": 'TEXT COLLATE "C"', "double": "DOUBLE PRECISION", "serial": "BIGSERIAL", "number": "BIGINT",
    "bytes": "BYTEA", "hash": "USING hash", "true": "true",
}  # fmt: skip


def make(url: str) -> None:
    """At a URL as SQLAlchemy writes it."""
    engine = create_engine(url)
    spelling = SQLITE if engine.dialect.name == "sqlite" else POSTGRESQL
    with engine.begin() as connection:
        for statement in TABLES.format(**spelling).split(";\n"):
            if statement.strip():
                connection.execute(text(statement))
    engine.dispose()
