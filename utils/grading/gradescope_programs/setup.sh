#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the container's image.
set -eux
apt-get update
apt-get install -y --no-install-recommends libseccomp2 make python3-pip python3-venv
# The course needs Python 3.11 or later, which not every image has.
python3 -m pip install --break-system-packages uv || python3 -m pip install uv
export UV_PYTHON_INSTALL_DIR=/opt/python
python="$(uv python find '>=3.11,<3.15' || { uv python install 3.12 >&2 && uv python find 3.12; })"
cd /autograder/source/course
make PYTHON="$python" .venv/.grade
# Fashion-MNIST where ranks, which are other users, can read it. Without it the labs use a stand-in.
XDG_CACHE_HOME=/opt/cache .venv/bin/python -c 'from utils import data; data.fashion_mnist()' || true
mkdir -p /opt/cache && chmod -R go+rX /opt
# Ranks need Python. The rest of this folder is root's alone, and so are its names.
chmod -R go-rwx /autograder/source
chmod 711 /autograder/source /autograder/source/course
chmod -R go+rX /autograder/source/course/.venv
