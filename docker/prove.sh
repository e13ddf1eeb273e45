#!/bin/sh
# Prove docker/Dockerfile without a container engine: execute its own steps in fresh Debian roots, then serve the
# example models from the result as uid 1000, with a read-only root and without a network, and ask them.
#
#   docker/prove.sh [TARGET] [DIRECTORY]       as root; TARGET is cpu (default) or cuda; about 3 GB in DIRECTORY
#
# Needs mmdebstrap (with PROVE_MIRROR, if set), bubblewrap and python3. TORCH_INDEX is the build argument. Variables of
# pip (PIP_*) and the files of PROVE_BINDS (separated by spaces) are there during the steps, for machines that reach an
# index in their own way.
set -eu
here="$(cd "$(dirname "$0")" && pwd)"
target="${1:-cpu}"
directory="${2:-$(mktemp --directory)}"
mkdir -p "$directory"
# The base image is Debian bookworm with Python in /usr/local; Debian's own Python is of the same minor version.
if [ ! -d "$directory/base-image" ]; then
    rm -rf "$directory/base-image.partial"
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
        bookworm "$directory/base-image.partial" ${PROVE_MIRROR:+"$PROVE_MIRROR"}
    mv "$directory/base-image.partial" "$directory/base-image"
fi
exec python3 "$here/prove.py" "$target" "$directory"
