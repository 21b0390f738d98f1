"""Keys and credentials for a NATS server that asks for them, made for a test (JWT v2, signed with nkeys)."""

from __future__ import annotations

import base64
import json
import random
from typing import Any, NamedTuple

import nkeys


class Nkey(NamedTuple):
    seed: str
    public: str


def make_nkey(draw: random.Random, prefix: int = nkeys.PREFIX_BYTE_USER) -> Nkey:
    seed = bytes(nkeys.encode_seed(draw.randbytes(32), prefix))
    return Nkey(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())


def _segment(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _jwt(issuer: Nkey, subject: Nkey, **claims: Any) -> str:
    body = {
        "jti": subject.public,
        "iat": 0,
        "iss": issuer.public,
        "sub": subject.public,
        "nats": claims | {"version": 2},
    }
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    said = ".".join(_segment(json.dumps(part).encode()) for part in (head, body))
    return f"{said}.{_segment(nkeys.from_seed(bytearray(issuer.seed, 'ascii')).sign(said.encode()))}"


class Accounts(NamedTuple):
    """A server's `configuration` with one account, and a user's `creds`."""

    configuration: str
    creds: str


def make_accounts(draw: random.Random) -> Accounts:
    operator, account = make_nkey(draw, nkeys.PREFIX_BYTE_OPERATOR), make_nkey(draw, nkeys.PREFIX_BYTE_ACCOUNT)
    user = make_nkey(draw)
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    account_jwt = _jwt(operator, account, type="account", limits=unlimited | {"wildcards": True})
    user_jwt = _jwt(account, user, type="user", subs=-1, data=-1, payload=-1)
    configuration = (
        f"operator: {_jwt(operator, operator, type='operator')}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {account_jwt} }}\n"
    )
    parts = (("NATS USER JWT", user_jwt), ("USER NKEY SEED", user.seed))
    creds = "\n".join(f"-----BEGIN {name}-----\n{text}\n------END {name}------\n" for name, text in parts)
    return Accounts(configuration, creds)
