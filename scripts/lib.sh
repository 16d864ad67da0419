# Functions shared by the scripts beside this file; sourced, never run.

# Where it is set, each process of Ray, of a client or of a server would compile all that it imports.
unset PYTHONDONTWRITEBYTECODE

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

# What pip says is shown where it fails. Where it succeeds, its warnings are about indexes of the
# machine's own configuration, and about attempts that a later one made up for.
# Installs into the environment `venv`, or else .venv; the pip of .venv into one that has none.
pip_install() {
    pip_python=${venv:-.venv}/bin/python pip_into=
    if [ ! -x "${pip_python%python}pip" ]; then
        pip_into=--python=$pip_python pip_python=.venv/bin/python
    fi
    # shellcheck disable=SC2086
    pip_output=$("$pip_python" -m pip $pip_into install --quiet --quiet \
        --disable-pip-version-check --no-compile "$@" 2>&1) && return 0
    pip_status=$?
    printf '%s\n' "$pip_output" >&2
    return "$pip_status"
}

# pip would compile 12000 files on one core. Most of their bytes are left to whoever imports them:
# packages' own tests, the models of transformers, of which tests need thirty, and PyTorch's compilers
# and other parts that nothing here imports. What is no Python file, but a template, is left as it is.
compile_packages() {
    rarely='tests?|pip|networkx|setuptools|torchgen|pygments/lexers|sympy/(physics|stats|combinatorics)'
    .venv/bin/python -m compileall -q -j 0 \
        -x "/($rarely|torch/(_inductor|testing|_export))/|/transformers/models/[^a]" \
        .venv/lib >/dev/null 2>&1 || true
}

# Compiles the kernels with the machine's own Python: their build needs no package.
compile_first() {
    PYTHONPATH=src nice "$(find_python)" -c '
from outrider.core.env import cache_folder, compiler
from outrider.kernels.native.build import built_kernels
built_kernels(compiler(), cache_folder())' >/dev/null 2>&1 || true
}

# Compiles the kernels and measures which of them are faster, where that is not kept; what else doctor
# finds is not asked. Whoever starts other scripts of this folder has done it for them.
compile_kernels() {
    [ -z "${kernels_are_compiled:-}" ] || return 0
    .venv/bin/python -m outrider doctor >/dev/null 2>&1 || true
    export kernels_are_compiled=1
}

torch_spec() { sed -n 's/^# \(torch==[^ ]*\)$/\1/p' requirements.lock; }

has_torch() {
    .venv/bin/python - "$(torch_spec)" >/dev/null 2>&1 <<'END'
import sys
from importlib.metadata import version
sys.exit(version("torch").split("+")[0] != sys.argv[1].removeprefix("torch=="))
END
}

# On Linux the default wheel of torch brings gigabytes of CUDA; without an NVIDIA driver, ask for
# the CPU build first. Where that index is out of reach, pip goes on with the default one.
install_cpu_torch() {
    if [ "$(uname -s)" != Linux ] || command -v nvidia-smi >/dev/null 2>&1; then return 0; fi
    if has_torch; then return 0; fi
    say "installing $(torch_spec) (CPU build)"
    pip_install --no-deps --retries 1 --timeout 20 \
        --extra-index-url https://download.pytorch.org/whl/cpu "$(torch_spec)" 2>/dev/null || true
}

# What the lock has, for use or (`dev`) for work: every file with the hash that it has there.
install_locked() {
    wanted_lock=.venv/locked.txt
    if [ "$1" = dev ]; then
        cp requirements.lock "$wanted_lock"
    else
        sed '/^# For development$/,$d' requirements.lock > "$wanted_lock"
    fi
    pip_install --no-deps --require-hashes -r "$wanted_lock"
}
