# JupyterLab on lab 00, as an ordinary user:
#   docker build -t ddl-labs . && docker run --rm -it -p 8888:8888 --shm-size=1g ddl-labs
# Codespaces builds `base` (.devcontainer/devcontainer.json); Binder builds all of it, as it takes a
# Dockerfile in the root of a repository. `python tests/house/image.py` runs the steps without an engine.
FROM debian:bookworm-slim AS base

RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates git make python3-venv \
 && rm -rf /var/lib/apt/lists/*

# Binder gives these two.
ARG NB_USER=student
ARG NB_UID=1000
# Terminals of JupyterLab are login shells, and /etc/profile sets PATH anew.
RUN echo 'PATH="$HOME/ddl-labs/.venv/bin:$PATH"' > /etc/profile.d/ddl-labs.sh
RUN useradd --create-home --shell /bin/bash --uid ${NB_UID} ${NB_USER}
ENV HOME=/home/${NB_USER} USER=${NB_USER} LANG=C.UTF-8
USER ${NB_UID}

FROM base AS labs

ENV COURSE=${HOME}/ddl-labs
COPY --chown=${NB_UID}:${NB_UID} . ${COURSE}
WORKDIR ${COURSE}/labs
RUN make -C .. env PIP_ARGS=--no-cache-dir

# Binder starts jupyterhub-singleuser in the last WORKDIR, with the settings that `make lab` gives.
RUN ${COURSE}/.venv/bin/pip install --no-cache-dir -c ${COURSE}/.ci/constraints.txt \
    "$(grep '^jupyterhub==' ${COURSE}/hpc/requirements.txt)"
ENV PATH=${COURSE}/.venv/bin:${PATH} JUPYTER_CONFIG_PATH=${COURSE}/utils/cluster/jupyterlab

EXPOSE 8888
CMD ["make", "-C", "..", "lab", "PORT=8888", "ARGS=--no-browser --ip=0.0.0.0"]
