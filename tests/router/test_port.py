"""Whether a port can be had is known before anything is made for it."""

from __future__ import annotations

import socket

import pytest

from router.port import check_free


def test_a_free_one_is_found_and_left_free() -> None:
    *_, (host, port) = check_free("127.0.0.1", 0)
    assert (host, port > 0) == ("127.0.0.1", True)
    assert check_free("127.0.0.1", port)[3] == (host, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_one_that_is_taken_is_not(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        check_free(host, taken.getsockname()[1])
