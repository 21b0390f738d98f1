"""The type of an error, by which clients' libraries choose what they raise."""

from __future__ import annotations

import json

import pytest

from router.openai.errors import error_response


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_errors_have_the_types_that_clients_know(status: int, kind: str) -> None:
    told = json.loads(error_response(status, "why").body)
    assert told == {"type": "error", "error": {"message": "why", "type": kind, "param": None, "code": status}}
