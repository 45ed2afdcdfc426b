# The operator: neither torch nor FastAPI. Build from the repository's root:
#   docker build -f docker/operator.Dockerfile -t headway/operator:0.1.0 .
FROM python:3.11-slim-bookworm AS build
COPY requirements/operator.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --require-hashes --target /app -r /tmp/requirements.txt
COPY core/headway_core /app/headway_core
COPY operator/headway_operator /app/headway_operator
RUN python -m compileall -q /app/headway_core /app/headway_operator

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="headway operator" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /app /app
# USER is set because kopf asks for the user's name, and a numeric user without an entry in /etc/passwd has none.
ENV PYTHONPATH=/app PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp USER=headway
USER 65532:65532
EXPOSE 8001
ENTRYPOINT ["python3", "-m", "headway_operator"]
