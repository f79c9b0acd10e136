# A node in a container.
#   GPU:  docker build -t zeroband .
#   CPU:  docker build -t zeroband --build-arg TORCH=cpu --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU wheels> .
#         (or lay a CPU wheel for this Python into wheelhouse/ first)
#   run:  docker run --rm --init --gpus all --network host --shm-size 64g -e ZERO_BAND_STORE__URL=redis://HOST:6379 \
#             zeroband --nproc_per_node=8 src/zeroband/train.py @configs/10B.toml
# `docker stop --time 40` lets the node hand over its work (fault.grace_s); after the 10 s of the default it is killed.
# --shm-size: the node's canonical state lives in /dev/shm, 16 to 40 bytes for each parameter (`zeroband doctor`).
FROM python:3.12-slim-bookworm AS build
ARG TORCH=cuda
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /app
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py requirements.lock README.md LICENSE ./
COPY scripts/setup.sh scripts/check_lock.py scripts/
COPY wheelhouse wheelhouse
COPY src src
# Who runs a node may not write here, so bytecode is made now. The second step takes uv and the simulator's Redis out again.
RUN export UV_COMPILE_BYTECODE=1 \
    && ./scripts/setup.sh --torch "$TORCH" \
    && .venv/bin/uv sync --quiet --frozen --no-default-groups \
    && rm -rf /root/.cache wheelhouse

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 1000 zeroband && install -d -o zeroband /app/runs
WORKDIR /app
COPY --from=build /app /app
COPY configs configs
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
ENTRYPOINT ["zeroband", "launch"]
CMD ["--nproc_per_node=1", "src/zeroband/train.py", "@configs/debug/normal.toml"]
