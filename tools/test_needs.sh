#!/bin/sh
# Looks for the programs that tests need beside Python's packages, and installs them as root with apt-get: a Chromium for
# the console, a Redis for what servers share. Without one its tests fail, unless a variable leaves them out.
set -u

# $1: what is left out without it, $2: its package, $3: the variable that goes without, $4…: names of its program
need() {
  what=$1 package=$2 variable=$3
  shift 3
  eval "[ \"\${$variable:-}\" = 1 ]" && return
  for program in "$@"; do
    command -v "$program" >/dev/null && return
  done
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "no $package: installing the system's package with apt-get, for the tests of $what ($variable=1 goes without)"
    # RUNLEVEL: the package would start a server of its own
    export RUNLEVEL=1
    install="apt-get install -qq -y --no-install-recommends $package"
    $install >/dev/null 2>&1 || { apt-get update -qq && $install >/dev/null; } && return
  fi
  echo "no $package: install it, or set $variable=1 to leave $what untested"
}

[ -n "${CARPOOL_CHROMIUM:-}" ] \
  || need "the console" chromium CARPOOL_NO_BROWSER chromium chromium-browser google-chrome google-chrome-stable
need "the shared cache" redis-server CARPOOL_NO_REDIS redis-server
