"""Why an HTTP request failed, in words for people."""

from __future__ import annotations

import os
import socket
import ssl

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError, PayloadEncodingError

LATE = "it did not answer in time"


_UNKNOWN_AUTHORITY = frozenset((18, 19, 20, 21))
"""OpenSSL's codes where naming the authority helps; it does not against a wrong name or a date."""


def reason_of(error: Exception, ca_flag: str = "") -> str:
    """Short and without an address, since clients may be told it. `ca_flag`: names authorities to trust."""
    if isinstance(error, TimeoutError):  # whatever it came from, which is a cancellation
        return LATE
    cause = error.__cause__ or error
    return _of_tls(cause, ca_flag) if isinstance(cause, ssl.SSLError) else _of_connection(cause)


def _of_tls(error: ssl.SSLError, ca_flag: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = f"; see {ca_flag}" if ca_flag and error.verify_code in _UNKNOWN_AUTHORITY else ""
        return f"its certificate is not trusted ({error.verify_message}){hint}"
    hint = "; it may speak plain http" if error.reason == "WRONG_VERSION_NUMBER" else ""
    return f"TLS failed ({(error.reason or 'no reason given').replace('_', ' ').lower()}){hint}"


def _of_connection(error: BaseException) -> str:
    match error:
        case socket.gaierror(strerror=message):
            return message or "its name is not known"
        case OSError(errno=int(number)):
            return os.strerror(number)
        case aiohttp.ServerDisconnectedError() | ConnectionResetError():
            return "it closed the connection without an answer"
        case aiohttp.ClientPayloadError() | PayloadEncodingError():
            return "its answer could not be read whole"
        case aiohttp.ClientResponseError() | HttpProcessingError():
            return "what it answers is no HTTP"
        case other:
            return type(other).__name__
