"""The admin surface as an OpenAPI 3.1 document: paths by hand, schemas from the shapes themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from engines.disaggregation import CONNECTORS
from router.admin.shapes import MOST_SECONDS, Change, Error, Limits, LogLevel, Workers
from router.workers.spec import MOST_BLOCK_TOKENS, ROLE_FIELDS

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_IPV6 = r"\[(::1|[0-9A-Fa-f]{1,4}(:[0-9A-Fa-f]{1,4}){7})\]"
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_URL = rf"""^https?://({_LABEL}(\.{_LABEL})*|{_IPV6})(:{_PORT})?(/[!-"$->@-~]*)?$"""
"""A little less than `router.workers.spec` takes; what it takes is what counts."""
_ENDPOINT: Json = {"type": ["string", "null"], "pattern": r"^(tcp|ipc)://[!-)+-~]+$"}
NEW_WORKER: Json = {
    "type": "object",
    "description": "The keys of --worker in YAML. What is not stated is asked of the engine.",
    "required": ["url"],
    "additionalProperties": False,
    "properties": {
        "url": {
            "type": "string",
            "description": "Of the engine, without /v1, a user, a query or a fragment.",
            "pattern": _URL,
            "examples": ["http://10.0.0.7:8000"],
        },
        "name": {
            "type": ["string", "null"],
            "description": "By which it is known; HOST:PORT without.",
            "pattern": r"^[A-Za-z0-9][A-Za-z0-9_.:\[\]-]*$",
        },
        "events": {**_ENDPOINT, "description": "ZMQ endpoint of rank 0's events."},
        "replay": {**_ENDPOINT, "description": "ZMQ endpoint of rank 0's replay."},
        "block_size": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": MOST_BLOCK_TOKENS,
            "description": "Tokens per KV block.",
        },
        "role": {"enum": ["auto", "prefill", "decode", "both"]},
        "connector": {"enum": [*CONNECTORS, None], "description": "How it hands KV over."},
        "bootstrap_port": {"type": ["integer", "null"], "minimum": 1, "maximum": 65535},
        "host": {
            "type": ["string", "null"],
            "minLength": 1,
            "description": "A name that workers share between which KV need not cross a network.",
        },
        "store": {"type": "boolean", "description": "Whether it takes anything from the shared store."},
    },
}

_ID: Json = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "The worker's name; HOST:PORT if it was given none.",
    "schema": {"type": "string", "minLength": 1},
}
_TIMEOUT: Json = {
    "name": "timeout",
    "in": "query",
    "description": "Seconds after which requests still in flight are cut off (default: --drain-timeout).",
    "schema": {"type": "number", "minimum": 0, "maximum": MOST_SECONDS},
}

_ERRORS = {
    400: "The body is not JSON.",
    401: "The request has no valid key.",
    403: "The key, or the Host header, does not allow it.",
    404: "There is no such worker.",
    409: "There is a worker of that name or URL already, or the worker's removal can no longer be stopped.",
    413: "The body is too large.",
    415: "The Content-Type of the body is not JSON.",
    422: "A key or a value is wrong; the message says which.",
}
_BODY_ERRORS = (400, 413, 415, 422)


@cache
def document() -> Json:
    _, schemas = msgspec.json.schema_components([Workers, Change, Limits, LogLevel, Error], ref_template=_REFERENCE)
    schemas["Change"]["minProperties"] = 1
    schemas["Change"]["properties"] |= {name: NEW_WORKER["properties"][name] for name in ROLE_FIELDS}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kv-router administration",
            "version": "1",
            "description": "Changes the fleet, the limits and the log level while the router runs.",
        },
        "paths": _paths(),
        "components": {
            "schemas": {**schemas, "NewWorker": NEW_WORKER},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _paths() -> Json:
    return {
        "/admin/workers": {
            "get": _operation("All workers.", 200, "Workers"),
            "post": _operation("Add a worker.", 201, "WorkerState", "NewWorker", (409,)),
        },
        "/admin/workers/{id}": {
            "parameters": [_ID],
            "get": _operation("One worker.", 200, "WorkerState", errors=(404,)),
            "patch": _operation(
                "Drain it, put it back to work, or change its role for separate prefill and decode.",
                200,
                "WorkerState",
                "Change",
                (404, 409),
            ),
            "delete": {
                **_operation("Drain it and then remove it.", 202, "WorkerState", errors=(404, 422)),
                "parameters": [_TIMEOUT],
            },
        },
        "/admin/limits": {
            "get": _operation("The limits on requests.", 200, "Limits"),
            "put": _operation("Change the limits on requests.", 200, "Limits", "Limits"),
        },
        "/admin/log-level": {
            "get": _operation("The lowest severity that is logged.", 200, "LogLevel"),
            "put": _operation("Change the lowest severity that is logged.", 200, "LogLevel", "LogLevel"),
        },
        "/admin/openapi.json": {"get": _operation("This document.", 200)},
    }


def _operation(
    summary: str, status: int, told: str | None = None, asked: str | None = None, errors: tuple[int, ...] = ()
) -> Json:
    """`told` and `asked`: names of schemas."""
    failing = sorted({401, 403, *errors, *(_BODY_ERRORS if asked else ())})
    responses = {str(status): _content(told, summary)} | {
        str(code): _content("Error", _ERRORS[code]) for code in failing
    }
    operation: Json = {"summary": summary, "responses": responses}
    if asked:
        operation["requestBody"] = {"required": True, **_content(asked)}
    return operation


def _content(name: str | None, description: str | None = None) -> Json:
    schema: Json = {"$ref": _REFERENCE.format(name=name)} if name else {"type": "object"}
    content: Json = {"content": {"application/json": {"schema": schema}}}
    return content if description is None else {"description": description, **content}
