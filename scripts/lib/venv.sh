# Sourced by scripts/serve and scripts/test. Owns .venv: makes it, installs Millpond and its dependencies into it, and
# leaves it alone while they are up to date. Must never know what is run afterwards.
# Invariant: .venv/millpond-stamp exists only over a finished installation of exactly what it says.
#
# Written for bash 3.2, which is what macOS has.

say() { printf 'millpond: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# The mlx backend of this machine, as the name of an extra; empty on macOS, where mlx brings Metal by itself.
backend_extra() {
    [ "$(uname -s)" = Linux ] || return 0
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi
}

# A candidate is run, not only looked up: a version switcher's shim exists also for versions that are not there, and
# Debian's python3 comes without ensurepip.
is_usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_usable_python "$PYTHON" || die "PYTHON=$PYTHON is no Python 3.11 or newer with venv and ensurepip"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3; do
        if is_usable_python "$candidate"; then echo "$candidate"; return; fi
    done
    die "no Python 3.11 or newer with venv and ensurepip found; install one or set PYTHON to its path"
}

# What an installation depends on besides its extras. The texts themselves and not a hash of them: comparing strings
# needs no hash program (each system names its own) and starts no process, so a second start goes on at once.
wanted_stamp() {
    local repo="$1" line
    while read -r line; do
        case "$line" in version*) echo "$line" ;; esac
    done <"$repo/.venv/pyvenv.cfg"
    echo "$repo"
    printf '%s\n' "$(<"$repo/setup.cfg")" "$(<"$repo/pyproject.toml")"
}

# The extras a finished installation has; fails if there is none, or one of something else.
installed_extras() {
    local repo="$1" stamp newline=$'\n'
    [ -x "$repo/.venv/bin/python" ] || return 1
    [ -f "$repo/.venv/millpond-stamp" ] && [ -f "$repo/.venv/pyvenv.cfg" ] || return 1
    stamp="$(<"$repo/.venv/millpond-stamp")"
    [ "${stamp#*$newline}" = "$(wanted_stamp "$repo")" ] || return 1
    echo "${stamp%%$newline*}"
}

is_up_to_date() {
    local repo="$1" extras="$2" have extra
    have="$(installed_extras "$repo")" || return 1
    for extra in ${extras//,/ }; do
        case ",$have," in *",$extra,"*) ;; *) return 1 ;; esac
    done
    is_python_asked_for "$repo"
}

# PYTHON names a version: an environment of another one does not do. Without it any environment does.
is_python_asked_for() {
    local version
    [ -n "${PYTHON:-}" ] || return 0
    version="$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || return 1
    [ -e "$1/.venv/lib/python$version" ]
}

# Lock file descriptor 9 of this shell. flock belongs to the open file, which the shell shares with the Python that
# locks it, so the lock outlives that Python and vanishes with the shell, however it ends: it cannot go stale.
lock_fd_9() {
    "$1" -c 'import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("millpond: waiting for another installation to finish", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)'
}

# Scripts in an environment name their interpreter by its full path, so one that was moved or copied is made anew.
is_usable_venv() {
    local repo="$1"
    "$repo/.venv/bin/python" -m pip --version >/dev/null 2>&1 &&
        grep -q -F -- "$repo/.venv" "$repo/.venv/pyvenv.cfg" &&
        is_python_asked_for "$repo"
}

# A plain `serve` must not take the extras away that somebody asked for earlier.
extras_to_install() {
    local repo="$1" extras="$2" had="" extra
    [ ! -f "$repo/.venv/millpond-stamp" ] || read -r had <"$repo/.venv/millpond-stamp"
    for extra in test diffusion; do
        case ",$extras," in *",$extra,"*) continue ;; esac
        case ",$had," in *",$extra,"*) extras="${extras:+$extras,}$extra" ;; esac
    done
    echo "$extras"
}

install_extras() {
    local repo="$1" extras="$2"
    say "installing Millpond into $repo/.venv${extras:+ with $extras}; the first time takes minutes"
    rm -f "$repo/.venv/millpond-stamp"
    # Twice quiet: errors only.
    "$repo/.venv/bin/python" -m pip install -qq --disable-pip-version-check -e "$repo${extras:+[$extras]}" ||
        die "installation failed: see pip's message above"
    { echo "$extras"; wanted_stamp "$repo"; } >"$repo/.venv/millpond-stamp.new"
    mv "$repo/.venv/millpond-stamp.new" "$repo/.venv/millpond-stamp"
}

# ensure_venv REPO [EXTRAS]: when it returns, REPO/.venv is complete, with this machine's backend and the comma-separated
# EXTRAS.
ensure_venv() {
    local repo="$1" extras python
    extras="$(backend_extra)"
    [ -z "${2:-}" ] || extras="${extras:+$extras,}$2"
    if is_up_to_date "$repo" "$extras"; then return; fi
    # Making it anew would empty whatever it points to, which another checkout may be running from.
    [ ! -L "$repo/.venv" ] || die "$repo/.venv is a link; remove it"
    python="$(find_python)" || exit 1
    { exec 9>>"$repo/.venv.lock"; } 2>/dev/null || die "cannot write in $repo"
    lock_fd_9 "$python" || die "cannot lock $repo/.venv.lock"
    # Again: another start may have installed while this one waited.
    if ! is_up_to_date "$repo" "$extras"; then
        extras="$(extras_to_install "$repo" "$extras")"
        is_usable_venv "$repo" || "$python" -m venv --clear "$repo/.venv" || die "cannot make $repo/.venv"
        install_extras "$repo" "$extras"
    fi
    exec 9>&-
}
