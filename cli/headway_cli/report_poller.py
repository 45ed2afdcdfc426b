"""Load reports of gateway and runtimes, polled over HTTP. No answer means absent, which is not the same as idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

import httpx
from headway_core.contract.documents import load_gateway_report, load_runtime_report
from headway_core.contract.http import PATH_LOAD
from headway_core.contract.reports import GatewayReport, RuntimeReport
from headway_core.errors import DocumentError

T = TypeVar("T")


async def runtime_reports(client: httpx.AsyncClient, urls: Mapping[str, str]) -> dict[str, RuntimeReport]:
    """Replica name → report, of those that answered. `urls`: replica name → base URL of its control port."""
    found = await asyncio.gather(*(_report(client, url, load_runtime_report) for url in urls.values()))
    return {name: report for name, report in zip(urls, found, strict=True) if report is not None}


async def gateway_report(client: httpx.AsyncClient, url: str) -> GatewayReport | None:
    """The gateway's report, or None while it does not answer."""
    return await _report(client, url, load_gateway_report)


async def _report(client: httpx.AsyncClient, url: str, load: Callable[[bytes], T]) -> T | None:
    try:
        response = await client.get(url + PATH_LOAD)
        return load(response.content) if response.status_code == 200 else None
    except (httpx.HTTPError, DocumentError):
        return None
