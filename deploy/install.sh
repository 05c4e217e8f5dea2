#!/bin/sh
# Install offramp, for serving on CPU, into a virtual environment of its own.
#
#   deploy/install.sh TARGET [SOURCE]
#
# TARGET  the folder for the virtual environment; made if it isn't there, upgraded if it is
# SOURCE  a wheel, or a folder with offramp's source; default: the source this script lies in
#
# PYTHON names the interpreter (default: python3); EXTRAS what to install (default: cpu,server).
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=$1
source=${2:-$here}
python=${PYTHON:-python3}
extras=${EXTRAS:-cpu,server}

if [ ! -e "$source" ]; then
    echo "install.sh: $source: no such file or folder." >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "install.sh: $python is not Python 3.11 or later. Name one with PYTHON=…" >&2
    exit 2
fi

# An absolute path, so that pip can't take it for the name of a package.
source=$(CDPATH='' cd -- "$(dirname -- "$source")" && pwd)/$(basename -- "$source")
set -- "${source}[${extras}]"
if [ -f "$here/constraints.txt" ]; then
    set -- -c "$here/constraints.txt" "$@"
fi
"$python" -m venv "$target"
PIP_DISABLE_PIP_VERSION_CHECK=1 "$target/bin/python" -m pip install --quiet --upgrade "$@"
"$target/bin/offramp" version
echo "Serve a bundle with: $target/bin/offramp serve BUNDLE"
