# Sourced by scripts/setup and scripts/setup-verl: finds a Python, gets what a build needs, makes an environment.
# Messages begin with $setup, the name of the script that asks. Installs Debian packages only as root, and says so.

# A python of at least 3.11: $PYTHON if given, else the first that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "$setup: no Python 3.11 or newer found; install it (Debian 12: python3) or set PYTHON=" >&2
    return 1
}

# Debian packages that are missing for Python $1: a C compiler with libc's headers, and venv's ensurepip.
get_build_packages() {
    local missing=()
    if ! command -v cc >/dev/null || ! echo '#include <sys/uio.h>' | cc -E - >/dev/null 2>&1; then
        missing+=(gcc libc6-dev)
    fi
    "$1" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    if ((${#missing[@]} == 0)); then
        return
    fi
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        echo >&2 "$setup: installing Debian packages: ${missing[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    else
        echo "$setup: missing Debian packages: ${missing[*]} (as root: apt-get install ${missing[*]})" >&2
        return 1
    fi
}

# The environment in folder $1 by Python $2, made anew if it has no working pip.
make_environment() {
    if ! "$1/bin/python" -m pip --version >/dev/null 2>&1; then
        echo >&2 "$setup: making $1"
        rm -rf "$1"
        "$2" -m venv "$1"
    fi
}

# One line that changes with what is installed: the files given and the sources of the native library.
fingerprint() {
    local native=(tensorhub/native/*.[ch])
    [[ -e ${native[0]} ]] || native=()
    cat "$@" pyproject.toml setup.py scripts/setup-lib.sh "${native[@]}" | sha256sum
}
