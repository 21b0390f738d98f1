"""Which model a form names, in whatever form clients write it."""

from __future__ import annotations

import pytest

from router.forms import form_model

KIND = b"multipart/form-data; boundary=b1"
FILE = b'Content-Disposition: form-data; name="file"; filename="x; name=model"\r\nContent-Type: audio/wav\r\n\r\n'


def form(*parts: bytes, end: bytes = b"--b1--\r\n") -> bytes:
    return b"".join(b"--b1\r\n" + part + b"\r\n" for part in parts) + end


def named(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b"Content-Disposition: form-data; name=" + name + b"\r\n" + more + b"\r\n" + value


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (form(named(b'"model"', b"whisper")), "whisper"),
        (form(FILE + b"\0\xff\r\n\r\n--b0\r\n", named(b"model", b"org/name"), named(b'"language"', b"en")), "org/name"),
        (form(named(b'"model"', "modèle".encode(), b"content-type: text/plain; charset=utf-8\r\n")), "modèle"),
        (form(b"Content-Type: text/plain\r\ncontent-disposition: form-data; name=model\r\n\r\nx"), "x"),
        (b"a preamble\r\n" + form(named(b'"model"', b"x")), "x"),
        (form(named(b'"model"', b"one"), named(b'"model"', b"two")), "one"),
        (form(named(b'"model"', b"")), ""),
        (form(named(b'"model"', b"x"), end=b""), None),
        (form(named(b'"model_name"', b"x"), named(b'"a model"', b"x"), named(b"models", b"x")), None),
        (form(FILE + named(b'"model"', b"x")), None),
        (form(b"name=model\r\n\r\nx"), None),
        (form(named(b'"model"', b"x" * 2000)), None),
        (form(*[named(b"a", b"")] * 100, named(b'"model"', b"x")), None),
        (b"", None),
        (b"--b1", None),
        (b'{"model":"x"}', None),
    ],
)
def test_the_model_of_a_form(body: bytes, model: str | None) -> None:
    assert form_model([(b"host", b"h"), (b"content-type", KIND)], body) == model


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (b'Multipart/Form-Data; charset=utf-8; Boundary="b1"', "x"),
        (b"multipart/form-data;boundary=b1; charset=utf-8", "x"),
        (b"multipart/form-data; boundary=b2", None),
        (b"multipart/form-data", None),
        (b"multipart/mixed; boundary=b1", None),
        (b"application/json", None),
    ],
)
def test_what_says_how_a_form_is_cut(kind: bytes, model: str | None) -> None:
    assert form_model([(b"content-type", kind)], form(named(b'"model"', b"x"))) == model


def test_any_other_body_is_none() -> None:
    assert form_model([], form(named(b'"model"', b"x"))) is None
