# A node in a container, and the Redis that nodes meet at.
#   GPU:   docker build -t zeroband .
#   CPU:   docker build -t zeroband --target cpu .   (where PyTorch's index of CPU wheels cannot be reached:
#          --build-arg PIP_EXTRA_INDEX_URL=<a mirror of it>, or lay a CPU wheel for this Python into wheelhouse/ first)
#   look:  docker run --rm --gpus all --shm-size 4g zeroband doctor @150M
#   run:   docker run --rm --init --gpus all --network host --shm-size 4g --read-only --tmpfs /tmp -v cache:/cache \
#              -v runs:/app/runs -e ZERO_BAND_STORE__URL=redis://HOST:6379 \
#              zeroband launch --nproc_per_node=gpu @150M
# `docker stop --time 40` lets the node hand over its work (fault.grace_s); after the 10 s of the default it is killed.
# --shm-size: the node's canonical state lives in /dev/shm, 16 to 40 bytes for each parameter (`zeroband doctor`).
# The same bytes each time: --build-arg BASE=python:3.12-slim-bookworm@sha256:..., of which
# `docker buildx imagetools inspect python:3.12-slim-bookworm` shows the newest.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS base
# While it trains, a node compiles: Triton with gcc, torch.compile on CPUs with g++ and openssl (for a digest), against the
# headers of libc and Python. Redis is for the store, and for `zeroband demo`.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ openssl redis-server \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app

FROM base AS build
ARG PIP_EXTRA_INDEX_URL=
# Who runs a node may not write here, so bytecode is made now.
ENV UV_COMPILE_BYTECODE=1
COPY pyproject.toml setup.py requirements.lock README.md LICENSE ./
COPY scripts/setup.sh scripts/check_lock.py scripts/
COPY wheelhouse wheelhouse
COPY configs configs
COPY src src

# The second step of each brings the extras, and takes uv and the wheel of Redis out again.
FROM build AS build-cpu
RUN ./scripts/setup.sh --torch cpu \
    && .venv/bin/uv sync --quiet --frozen --no-default-groups --all-extras \
    && rm -rf /root/.cache wheelhouse

FROM build AS build-cuda
RUN ./scripts/setup.sh --torch cuda \
    && .venv/bin/uv sync --quiet --frozen --no-default-groups --all-extras \
    && rm -rf /root/.cache wheelhouse

FROM base AS node
# Everything that is written while it runs goes here, so that the rest may be read-only.
RUN useradd --uid 1000 --home-dir /cache zeroband && install -d -o zeroband /cache runs
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 \
    HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
COPY examples examples
USER 1000
VOLUME ["/cache", "/app/runs"]
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m CMD ["zeroband", "health"]
ENTRYPOINT ["zeroband"]
CMD ["launch", "--nproc_per_node=1", "@debug/normal"]

FROM node AS cpu
COPY --from=build-cpu /app /app
RUN zeroband doctor @debug/normal --train.compile && python -c "from zeroband.kernels.native import load; load()"

FROM node AS cuda
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /app /app
RUN zeroband doctor @debug/normal --train.compile && python -c "from zeroband.kernels.native import load; load()"
