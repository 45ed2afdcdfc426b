"""Calls to the API server: JSON in, JSON out, retried where that is safe. Credentials come from the kubernetes client.

Nothing here knows what an object means. A call that fails for good raises `KubeError`; one that failed for now has been
tried again with backoff, and raises with `transient` set when that did not help, so that the caller comes back later.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Mapping
from typing import Any

import httpx
from headway_core.errors import HeadwayError
from kubernetes import client, config

from headway_operator.metrics import API_CALLS

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

_ATTEMPTS = 3
_LONGEST_PAUSE = 2.0


class KubeError(HeadwayError):
    """The API server refused a call, or failed. `status` 0: it could not be reached."""

    def __init__(self, status: int, message: str, what: str) -> None:
        super().__init__(f"{what}: {message}" + (f" ({status})" if status else ""))
        self.status = status
        self.message = message

    @property
    def transient(self) -> bool:
        """Worth another try later, by itself."""
        return self.status in (0, 429) or self.status >= 500

    @property
    def forbidden(self) -> bool:
        """A right is missing; the message names it."""
        return self.status == 403

    @property
    def conflict(self) -> bool:
        """Somebody else was first: read again."""
        return self.status == 409

    @property
    def missing(self) -> bool:
        """Not there, or gone."""
        return self.status in (404, 410)


class Kube:
    """One API server. `close` it at the end."""

    def __init__(self, concurrency: int = 16, timeout: float = 5.0) -> None:
        """`timeout` in seconds: a write begun under the lease must have ended before another operator may act.

        Raises KubeError without credentials.
        """
        self._configuration = _configuration()
        self._http = httpx.AsyncClient(
            base_url=self._configuration.host,
            verify=_tls(self._configuration),
            timeout=httpx.Timeout(timeout, connect=0.6 * timeout),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,
            headers={"User-Agent": "headway-operator"},
        )
        self._semaphore = asyncio.Semaphore(concurrency)
        self.denied = False
        """Set by every 403: rights may have changed, so they should be asked for again."""

    async def close(self) -> None:
        """Closes every connection."""
        await self._http.aclose()

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        """The object, or the list, at `path`."""
        return await self.call("GET", path, query=query)

    async def create(self, path: str, body: Mapping[str, Any], *, repeat: bool = True) -> dict[str, Any]:
        """POST: a new object, or the answer to a review. `repeat` False: a second try could do it twice."""
        return await self.call("POST", path, body=body, attempts=_ATTEMPTS if repeat else 1)

    async def replace(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """PUT, tried once: the caller's resourceVersion decides."""
        return await self.call("PUT", path, body=body, attempts=1)

    async def patch(self, path: str, body: Mapping[str, Any], kind: str = MERGE_PATCH, **query: str) -> dict[str, Any]:
        """PATCH with a merge patch, or an apply patch."""
        return await self.call("PATCH", path, query=query, body=body, kind=kind)

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        kind: str = "application/json",
        attempts: int = _ATTEMPTS,
    ) -> dict[str, Any]:
        """One call, tried up to `attempts` times while the failure is transient. Raises KubeError."""
        for attempt in range(attempts):
            try:
                return await self._once(method, path, query, body, kind)
            except _Later as later:
                if attempt == attempts - 1:
                    raise later.error from later
                pause = later.after if later.after is not None else 0.2 * 4**attempt
                await asyncio.sleep(min(_LONGEST_PAUSE, pause) * random.uniform(0.8, 1.2))
        raise AssertionError("the last attempt returns or raises")

    async def _once(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Mapping[str, Any] | None, kind: str
    ) -> dict[str, Any]:
        what = f"{method} {path}"
        content = None if body is None else json.dumps(body)
        headers = {**self._credentials(), "Content-Type": kind}
        try:
            async with self._semaphore:
                answer = await self._http.request(
                    method, path, params=dict(query or {}), content=content, headers=headers
                )
        except httpx.HTTPError as error:
            API_CALLS.labels(method, "none").inc()
            raise _Later(KubeError(0, str(error) or type(error).__name__, what)) from error
        API_CALLS.labels(method, str(answer.status_code)).inc()
        if answer.is_success:
            try:
                document: dict[str, Any] = answer.json()
            except ValueError as error:
                raise _Later(KubeError(502, f"an answer that is no JSON: {answer.text[:80]!r}", what)) from error
            return document
        self.denied = self.denied or answer.status_code == httpx.codes.FORBIDDEN
        failure = KubeError(answer.status_code, _message(answer), what)
        if failure.transient:
            raise _Later(failure, _retry_after(answer))
        raise failure

    def _credentials(self) -> dict[str, str]:
        """Read anew for each call: tokens are rotated under the client's feet."""
        settings = self._configuration.auth_settings().values()
        return {
            setting["key"]: setting["value"].strip()
            for setting in settings
            if setting["in"] == "header" and setting["value"]
        }


class _Later(Exception):
    """A transient failure; `after` are the seconds that the server asked for."""

    def __init__(self, error: KubeError, after: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.after = after


def _configuration() -> Any:
    configuration = client.Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        message = f"no credentials: run in a pod with a ServiceAccount, or set KUBECONFIG ({error})"
        raise KubeError(0, message, "connecting") from error
    return configuration


def _tls(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json().get("message") or answer.reason_phrase)
    except (ValueError, AttributeError):
        return answer.text[:200] or answer.reason_phrase


def _retry_after(answer: httpx.Response) -> float | None:
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else None
