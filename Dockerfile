# Lockstep in a container, for CPUs.
# Written by `lockstep launch docker --init`, to be read and changed.
#
#   docker build --tag me/train:1 .                   BuildKit, which Docker has since version 23
#   docker run --rm --init me/train:1 train digits
#
# An index that needs a password: docker build --secret id=pip,src=PIP.CONF. It is in no layer of the image.

# For NVIDIA GPUs: lockstep launch docker --init --cuda
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
# A further index for pip: PyTorch's own has its builds for CPUs, without CUDA's libraries.
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
ARG LOCKSTEP=".[digits,hf]"
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    echo "$LOCKSTEP" >/tmp/lockstep.txt \
    && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --constraint constraints.txt --requirement /tmp/lockstep.txt

FROM base
# A fixed id. Folders that are mounted must be writable for it: --build-arg UID=$(id -u) --build-arg GID=$(id -g)
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
