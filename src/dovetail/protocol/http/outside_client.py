"""The HTTP client of a user's program, for servers outside of a job."""

from __future__ import annotations

import httpx2

from dovetail.protocol.http.header_deadline import CLIENT_KEEP_SECONDS
from dovetail.protocol.process.inheritance import is_loopback


def outside_client(
    url: str, token: str | None, timeout: float | httpx2.Timeout, verify: bool | str = True
) -> httpx2.Client:
    """A client for the server at `url`. `token`: sent as a bearer token. `verify`: see httpx. It uses the environment's
    proxies, except for this machine."""
    return httpx2.Client(
        base_url=url.rstrip("/"),
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=timeout,
        limits=httpx2.Limits(keepalive_expiry=CLIENT_KEEP_SECONDS),
        verify=verify,
        trust_env=not is_loopback(url),
    )
