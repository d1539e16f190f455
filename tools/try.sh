#!/usr/bin/env bash
# Claims about a real SGLang server, on this machine's CPU: builds what is missing, then runs suites/cpu.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/common.sh

ensure_venv
ensure_cpu_stack
exec .venv/bin/python -m pytest suites/cpu "$@"
