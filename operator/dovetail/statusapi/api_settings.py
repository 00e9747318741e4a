"""The settings of an administrator for the status API."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ApiSettings:
    """The settings of an administrator. They are `DOVETAIL_API_*` variables of the pod. A token must be for one of
    `audiences`. Empty means the API server's own. Jobs in `namespaces` are shown. Empty means all. With
    `tls_certificate` and `tls_key` (paths) the API serves HTTPS. `coordinator_url` has {job} and {namespace}. It is for
    clusters in which the API cannot reach the addresses of pods. If it is empty, these addresses are used. Every
    `watch_seconds` all running jobs are asked for their progress, so that it is known when they are done. If it is 0,
    only jobs that somebody asks about are asked. Large answers (logs, traces, the run page's) take at most
    `answer_bytes` of memory together. Times are in seconds."""

    host: str = "0.0.0.0"
    port: int = 8080
    namespaces: tuple[str, ...] = ()
    audiences: tuple[str, ...] = ()
    tls_certificate: str = ""
    tls_key: str = ""
    coordinator_url: str = ""
    watch_seconds: float = 5.0
    auth_cache_seconds: float = 10.0
    poll_seconds: float = 2.0
    request_seconds: float = 10.0
    streams: int = 200
    answer_bytes: int = 48 << 20

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> ApiSettings:
        """Read the settings from the environment. A variable that is not set keeps its default. Raises ValueError that
        names the variable."""
        found: dict[str, Any] = {}
        for name, default in ApiSettings().__dict__.items():
            variable = f"DOVETAIL_API_{name.upper()}"
            text = environ.get(variable, "")
            if not text:
                continue
            if isinstance(default, tuple):
                found[name] = tuple(part.strip() for part in text.split(",") if part.strip())
                continue
            try:
                found[name] = type(default)(text)
            except ValueError as error:
                raise ValueError(f"{variable} is {text!r}, not a number") from error
        settings = ApiSettings(**found)
        if bool(settings.tls_certificate) != bool(settings.tls_key):
            raise ValueError("DOVETAIL_API_TLS_CERTIFICATE and DOVETAIL_API_TLS_KEY belong together; give both or none")
        return settings
