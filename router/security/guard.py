"""Checks API keys: which tenant a request belongs to, and whether that tenant may make it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from router.http.messages import API_KEY, AUTHORIZATION, Headers, RequestHead, Response
from router.openai.errors import BadRequest
from router.security.bucket import Bucket
from router.security.keys import Key, Keys

_OPEN = frozenset((b"/health", b"/ready", b"/metrics"))
"""Paths for monitoring, which may have no key."""
_SHOWN = (AUTHORIZATION, API_KEY)
Reason = Literal["no_key", "wrong_key", "rate", "concurrency", "model", "admin"]
Denied = Callable[[Reason], None]
"""Told why a request was refused."""


class Tenant:
    """The holder of a key, and how much of its limits is in use."""

    def __init__(self, key: Key, now: float, denied: Denied) -> None:
        self._denied = denied
        self.in_flight = 0
        self._take(key, now)

    def _take(self, key: Key, now: float) -> None:
        self.key = key
        self._bucket = Bucket(key.requests_per_minute, now) if key.requests_per_minute else None

    @property
    def name(self) -> str:
        return self.key.name

    def change(self, key: Key, now: float) -> None:
        """The key's entry was read again. What was used of a limit that is unchanged stays used."""
        if key.requests_per_minute == self.key.requests_per_minute:
            self.key = key
        else:
            self._take(key, now)

    def admit(self, now: float) -> None:
        """Raises BadRequest for one more request than it may make."""
        most = self.key.concurrency
        if most is not None and self.in_flight >= most:
            self._denied("concurrency")
            raise _too_many(f"Your key may have {most} requests in progress at a time.", 1)
        wait = self._bucket.take(now) if self._bucket else 0.0
        if wait:
            self._denied("rate")
            text = f"Your key may make {self.key.requests_per_minute:g} requests a minute."
            raise _too_many(text, math.ceil(wait))

    def begin(self) -> None:
        self.in_flight += 1

    def end(self) -> None:
        self.in_flight -= 1

    def may_use(self, model: str | None) -> bool:
        return self.key.models is None or model in self.key.models

    def check_model(self, model: str | None) -> None:
        """`model` None: the request names none, and might get any. Raises BadRequest."""
        if self.may_use(model):
            return
        self._denied("model")
        allowed = ", ".join(sorted(self.key.models or ()))
        if model is None:
            text = f"Your key is for some models only: name one of {allowed} in a JSON body."
            raise BadRequest(403, text, param="model")
        raise BadRequest(
            404,
            f"The model {model!r} does not exist, or not for your key, which is for {allowed}.",
            code="model_not_found",
            param="model",
        )


class Guard:
    def __init__(self, keys: Keys, protect_metrics: bool, clock: Callable[[], float], denied: Denied) -> None:
        self._protect_metrics = protect_metrics
        self._clock = clock
        self._denied = denied
        self._tenants: dict[str, Tenant] = {}
        """Those that have shown a key: to make them for all of thousands of keys at once would take long."""
        self.take(keys)

    def take(self, keys: Keys) -> None:
        """From now on these keys are valid, and no others. Whose requests are in progress may come back."""
        now, known, valid = self._clock(), self._tenants, keys.by_name
        self._keys = keys
        self._tenants = {name: tenant for name, tenant in known.items() if name in valid or tenant.in_flight}
        for name in self._tenants.keys() & valid.keys():
            self._tenants[name].change(valid[name], now)

    def refusal(self, target: bytes, headers: Headers) -> Response | None:
        """The answer to a request without a valid key, before its body is read; None if it has one or needs none."""
        if target.partition(b"?")[0] in _OPEN and not _has_body(headers):
            return None
        try:
            self._tenant(headers)
        except BadRequest as error:
            return error.response
        return None

    def enter(self, head: RequestHead) -> Tenant | None:
        """Count one more request for its tenant and return that; None if no key is needed. Raises BadRequest."""
        if head.path in _OPEN:
            if head.path == b"/metrics" and self._protect_metrics:
                self.check_admin(head.headers)
            return None
        tenant = self._tenant(head.headers)
        tenant.admit(self._clock())
        return tenant

    def check_admin(self, headers: Headers) -> None:
        """Raises BadRequest for anything but a key with `admin: true`."""
        if not self._tenant(headers).key.admin:
            self._denied("admin")
            raise BadRequest(403, "Your key may not do this: it takes one with `admin: true`.")

    def shows_workers(self, head: RequestHead) -> bool:
        """Whether /ready may tell more than yes or no."""
        if not self._protect_metrics:
            return True
        key = _key_in(head.headers)
        found = self._keys.find(key) if key else None
        return found is not None and found.admin

    def _tenant(self, headers: Headers) -> Tenant:
        key = _key_in(headers)
        if key is None:
            raise self._unauthorized("no_key", _how_to_show(headers))
        found = self._keys.find(key)
        if found is None:
            raise self._unauthorized("wrong_key", "Your API key is not valid here.")
        tenant = self._tenants.get(found.name)
        if tenant is None:
            tenant = self._tenants[found.name] = Tenant(found, self._clock(), self._denied)
        return tenant

    def _unauthorized(self, reason: Reason, message: str) -> BadRequest:
        self._denied(reason)
        return BadRequest(401, message, code="invalid_api_key", header=(b"www-authenticate", b"Bearer"))


def _key_in(headers: Headers) -> bytes | None:
    """As OpenAI's clients show it, or Anthropic's. None where two are shown: which counts is then anybody's guess."""
    shown = [_key_of(name, value) for name, value in headers if name in _SHOWN]
    return shown[0] if len(shown) == 1 else None


def _how_to_show(headers: Headers) -> str:
    shown = sum(name in _SHOWN for name, _ in headers)
    wrong = (
        f"{shown} headers show an API key, and which counts is unclear" if shown > 1 else "An API key is needed here"
    )
    return f"{wrong}: send one, as `Authorization: Bearer KEY` or as `x-api-key: KEY`."


def _key_of(name: bytes, value: bytes) -> bytes | None:
    if name == API_KEY:
        return value
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def _has_body(headers: Headers) -> bool:
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)


def _too_many(message: str, seconds: int) -> BadRequest:
    text = f"{message} Try again in {seconds} s."
    return BadRequest(429, text, code="rate_limit_exceeded", header=(b"retry-after", b"%d" % seconds))
