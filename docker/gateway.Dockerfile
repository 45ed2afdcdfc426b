# The gateway: no torch, no Kubernetes client. Build from the repository's root:
#   docker build -f docker/gateway.Dockerfile -t headway/gateway:0.1.0 .
FROM python:3.11-slim-bookworm AS build
COPY requirements/gateway.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --require-hashes --target /app -r /tmp/requirements.txt
COPY core/headway_core /app/headway_core
COPY edge/headway_edge /app/headway_edge
COPY gateway/headway_gateway /app/headway_gateway
RUN python -m compileall -q /app/headway_core /app/headway_edge /app/headway_gateway

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="headway gateway" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /app /app
# The root file system is read-only in the chart: nothing is compiled or cached at run time outside /tmp.
ENV PYTHONPATH=/app PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp USER=headway
USER 65532:65532
EXPOSE 8000 8001
ENTRYPOINT ["python3", "-m", "headway_gateway"]
