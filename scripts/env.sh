# Sourced by the other scripts: makes .venv with the locked dependencies once, and again when the lock changes or PYTHON
# names another interpreter.
root=$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
made_with_wanted() {
  [ -z "${PYTHON:-}" ] ||
    grep -qxF "executable = $("$PYTHON" -c 'import os, sys; print(os.path.realpath(sys.executable))')" .venv/pyvenv.cfg
}
venv_ready() {
  local python=${PYTHON:-python3} stamp=.venv/.lock-installed
  cmp -s requirements.lock "$stamp" && made_with_wanted && return
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed; $("$python" --version) was found. Set PYTHON to another interpreter." >&2
    return 1
  }
  echo "Setting up .venv (once) ..." >&2
  "$python" -m venv --clear .venv
  .venv/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
  cp requirements.lock "$stamp"
}
venv_ready
# Images of containers often set it. Then each of the hundreds of processes that tests start compiles all that it imports.
unset PYTHONDONTWRITEBYTECODE
export PATH="$root/.venv/bin:$PATH" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
