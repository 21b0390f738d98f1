"""Where and how the router listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from router.settings.options import about, read_bare_host, read_size


@dataclass(frozen=True, kw_only=True)
class Serving:
    host: Annotated[str, about("Serving", "Address to listen on.", "HOST", pattern=r"^\S+\Z", read=read_bare_host)] = (
        "127.0.0.1"
    )
    port: Annotated[int, about("Serving", "Port to listen on; 0 takes a free one.", "PORT", ge=0, le=65535)] = 8080
    processes: Annotated[
        int,
        about(
            "Serving",
            "Number of router processes. They share the port and know what the others have sent where; each has "
            "an index of its own.",
            "NUMBER",
            ge=1,
            le=256,
        ),
    ] = 1
    max_body_size: Annotated[
        int,
        about(
            "Serving",
            "Largest request body; larger ones are answered with 413.",
            "SIZE",
            ge=1,
            takes="a size such as 64MiB (KiB, MiB, GiB, or a plain number of bytes)",
            read=read_size,
        ),
    ] = 64 * 1024**2
    drain_timeout: Annotated[
        float,
        about(
            "Serving",
            "How long requests in flight may go on after a signal to stop, or at a worker that is being removed.",
            "SECONDS",
            ge=0,
            takes="a number of seconds, at least 0",
        ),
    ] = 30.0
