# Functions shared by the scripts beside this file; sourced, never run.

say() { printf 'outrider: %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n  try: %s\n' "$1" "$2" >&2
    exit 3
}

fits() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
        >/dev/null 2>&1
}

# Print a Python that fits: OUTRIDER_PYTHON alone if set, else the first on the path.
find_python() {
    if [ -n "${OUTRIDER_PYTHON:-}" ]; then
        if fits "$OUTRIDER_PYTHON"; then
            printf '%s\n' "$OUTRIDER_PYTHON"
            return 0
        fi
        say "OUTRIDER_PYTHON=$OUTRIDER_PYTHON is not a Python 3.11-3.13 with venv"
        return 1
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if fits "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

pip_install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

# On Linux the default wheel of torch brings gigabytes of CUDA; without an NVIDIA driver, ask for
# the CPU build first. Where that index is out of reach, pip goes on with the default one.
install_torch() {
    if [ "$(uname -s)" != Linux ] || command -v nvidia-smi >/dev/null 2>&1; then return 0; fi
    if .venv/bin/python -c 'import torch' >/dev/null 2>&1; then return 0; fi
    spec=$(sed -n 's/^ *"\(torch[^"]*\)",$/\1/p' pyproject.toml)
    say "installing $spec (CPU build)"
    pip_install --no-deps --retries 1 --timeout 20 \
        --extra-index-url https://download.pytorch.org/whl/cpu "$spec" || true
}
