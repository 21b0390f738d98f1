"""What stands beside the brackets of an IPv6 address is not dropped, and a host is nothing but one."""

from __future__ import annotations

import pytest

from publishers.urls import is_bare_host, split_url


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://[::1]", "::1", None),
        ("http://[::1]:80/x", "::1", 80),
        ("http://u:p@[::1]:80", "::1", 80),
        ("//[::1]:0", "::1", 0),
        ("http://a:1/[x]", "a", 1),
    ],
)
def test_brackets_hold_an_address(url: str, host: str, port: int | None) -> None:
    assert (split_url(url).hostname, split_url(url).port) == (host, port)


@pytest.mark.parametrize("url", ["http://[::1]8000", "http://[::1]*", "http://a[::1]", "http://[::1]a:80", "//[::1]x"])
def test_nothing_stands_beside_them(url: str) -> None:
    with pytest.raises(ValueError, match=r"brackets|IPv6|port"):
        split_url(url)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        *((host, True) for host in ("gpu-1", "GPU-1.example.com", "10.0.0.7", "::1", "[::1]", "my_host", "localhost")),
        *(
            (none, False)
            for none in ("http://x", "x:80", "10.0.0.7:80", "[::1]:80", "[::1", "", "[]", "*", "a b", "x/y")
        ),
    ],
)
def test_a_host_alone(text: str, is_one: bool) -> None:
    assert is_bare_host(text) is is_one
