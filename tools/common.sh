# Sourced by try.sh and test.sh: finds a Python, keeps .venv up to date, builds the CPU stack.
# shellcheck shell=bash

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

# Can this interpreter run us (status 1 if not), and make a virtual environment (status 2 if not)?
suits() {
    "$1" - 2>/dev/null <<'PY'
import sys
if sys.version_info < (3, 10):
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(2)
PY
}

# The default python3 if it is new enough, else the newest other one on the PATH.
find_python() {
    local name status without_venv=""
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        command -v "$name" >/dev/null || continue
        status=0
        suits "$name" || status=$?
        case $status in
            0)
                command -v "$name"
                return
                ;;
            2) without_venv=${without_venv:-$name} ;;
        esac
    done
    [[ -z $without_venv ]] || fail "$without_venv cannot make virtual environments. On Debian and Ubuntu: apt install ${without_venv}-venv"
    fail "No Python 3.10 or newer is on the PATH (python3 is $(python3 --version 2>&1 || true))."
}

# ensure_venv [EXTRA]: .venv holds the plugin from this checkout, with that extra. Nothing to do costs no time.
ensure_venv() {
    local extra=${1:-} python stamp wanted
    stamp=.venv/.gpuguard-${extra:-plugin}
    wanted="$PWD $(cksum <pyproject.toml)"
    if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi
    if [[ ! -x .venv/bin/python ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        printf 'Making .venv with %s (%s)\n' "$python" "$("$python" --version)"
        "$python" -m venv --clear .venv
    fi
    printf 'Installing pytest-gpuguard%s into .venv\n' "${extra:+[$extra]}"
    .venv/bin/python -m pip install -q --disable-pip-version-check -e ".${extra:+[$extra]}"
    printf '%s' "$wanted" >"$stamp"
}

# The CPU stack is ready, and GPUGUARD_CPU_STACK names it.
ensure_cpu_stack() {
    .venv/bin/python tools/cpu_stack.py
    eval "$(.venv/bin/python tools/cpu_stack.py --print-env)"
}
