#!/usr/bin/env bash
# The project's own tests, those that boot a real SGLang server on this machine's CPU included: builds what is missing,
# then runs them. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/common.sh

ensure_venv test
ensure_cpu_stack
exec .venv/bin/python -m pytest -n logical --maxprocesses=4 "$@"
