# Lockstep and a project of yours in a container. Written by `lockstep init docker`, to be read and changed.
#
#   docker build --tag me/train:1 .                   BuildKit, which Docker has since version 23
#   docker run --rm --init me/train:1 train digits
#
# What to edit, or to give with --build-arg:
#   BASE_IMAGE    for NVIDIA GPUs, such as nvidia/cuda:13.0.1-devel-ubuntu24.04; without Python, it needs apt
#   TORCH_INDEX   a further index for pip. PyTorch's index of builds for CPUs, which its page "Get Started" states, saves
#                 5 GB of CUDA's libraries.
#   LOCKSTEP      what pip installs as Lockstep. A wheel in the folder `wheels` counts, such as that of a checkout:
#                 pip wheel --no-deps --wheel-dir wheels PATH
#   UID, GID      the user in the image. Folders that are mounted must be writable for it.
# An index that needs a password: docker build --secret id=pip,src=PIP.CONF. It is in no layer of the image.

ARG BASE_IMAGE=python:3.12.12-slim-bookworm

FROM ${BASE_IMAGE} AS base
# The images for CUDA have no Python.
ARG PYTHON=3.12
RUN if ! python3 -c "import ensurepip"; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends \
            python3="${PYTHON}.*" python3-dev="${PYTHON}.*" python3-venv="${PYTHON}.*" \
        && rm -rf /var/lib/apt/lists/*; \
    fi

FROM base AS packages
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /workspace
RUN python3 -m venv /opt/venv
# Only what pip reads, as far as it is there, so that a change of your code installs nothing again. Add what else
# requirements.txt names.
COPY .dockerignore requirements.tx[t] constraints.tx[t] wheel[s] ./
ARG TORCH_INDEX=""
ARG LOCKSTEP="lockstep-torch[digits,hf]"
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    touch requirements.txt constraints.txt \
    && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --find-links . \
        --constraint constraints.txt --requirement requirements.txt "$LOCKSTEP"

FROM base
ARG UID=1000
ARG GID=1000
RUN groupadd --non-unique --gid "$GID" lockstep \
    && useradd --non-unique --no-log-init --uid "$UID" --gid "$GID" --create-home lockstep \
    && chmod 1777 /home/lockstep \
    && mkdir -p /workspace/data /workspace/runs \
    && chown "$UID:$GID" /workspace /workspace/runs
COPY --from=packages /opt/venv /opt/venv
COPY . /workspace
ENV PATH=/opt/venv/bin:$PATH HOME=/home/lockstep USER=lockstep PYTHONUNBUFFERED=1
WORKDIR /workspace
USER ${UID}:${GID}
STOPSIGNAL SIGTERM
ENTRYPOINT ["lockstep"]
CMD ["--help"]
