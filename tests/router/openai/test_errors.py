"""The type of an error, by which clients' libraries choose what they raise."""

from __future__ import annotations

import json

import pytest

from router.openai.errors import error_event, error_response, typed_for


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_errors_have_the_types_that_clients_know(status: int, kind: str) -> None:
    told = json.loads(error_response(status, "why").body)
    assert told == {"type": "error", "error": {"message": "why", "type": kind, "param": None, "code": status}}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_clients_of_anthropics_api_know_other_types_of_a_servers_errors(status: int, kind: str) -> None:
    why = error_response(status, 'The worker said "type":"server_error".')
    assert json.loads(typed_for(b"/v1/messages", why).body)["error"] == json.loads(why.body)["error"] | {"type": kind}
    assert typed_for(b"/v1/chat/completions", why) == why
    event = error_event(status, "why", b"/v1/messages", b"")
    assert json.loads(event.removeprefix(b"event: error\ndata: "))["error"]["type"] == kind


@pytest.mark.parametrize(
    ("latest", "number"),
    [
        (b'event: x\ndata: {"type":"x","sequence_number":9}\n\nevent: y\ndata: {"sequence_number": 10,"d', 11),
        (rb'data: {"sequence_number":3,"delta":"\"sequence_number\":7"}', 4),
        (b'data: {"sequence_number":' + b"9" * 10_000 + b"}", 0),
        (b"", 0),
    ],
)
def test_an_error_in_a_stream_of_responses_has_the_next_number(latest: bytes, number: int) -> None:
    """Of the two forms in which clients look for an error there, it has both."""
    event = error_event(502, "why", b"/v1/responses", latest)
    told = json.loads(event.removeprefix(b"event: error\ndata: "))
    assert told == {
        **json.loads(error_response(502, "why").body),
        "sequence_number": number,
        "code": "502",
        "message": "why",
        "param": None,
    }


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/generate"])
def test_an_error_in_a_stream_without_names_has_its_name_behind_it(path: bytes) -> None:
    """aiperf and sglang.bench_serving know by the name that the stream broke. Before the data it would be taken for a
    part of the message by clients that read lines, such as go-openai."""
    data, name, *end = error_event(502, "why", path, b"").split(b"\n")
    assert json.loads(data.removeprefix(b"data: "))["error"]["message"] == "why"
    assert (name, end) == (b"event: error", [b"", b""])
