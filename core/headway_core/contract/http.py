"""Ports, paths and limits of the HTTP interfaces of gateway and runtime."""

from __future__ import annotations

SERVING_PORT = 8000
"""Requests: the OpenAI-compatible endpoint of gateway and runtime."""
CONTROL_PORT = 8001
"""Load report, policy, metrics, health: never exposed to clients."""
PATH_LOAD = "/load"
PATH_POLICY = "/policy"
PATH_METRICS = "/metrics"
PATH_HEALTH = "/health"
PATH_READY = "/ready"
MAX_BODY_BYTES = 16 * 2**20
"""Largest request body, unless a flag says otherwise: one number, so that the gateway is the one that refuses."""
MAX_CHOICES = 128
"""Answers to one request, over all its prompts."""
