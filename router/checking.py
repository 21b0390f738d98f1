"""What is checked of settings beyond their types and limits: whether a router can be started with them."""

from __future__ import annotations

from router.arms import check_mode, make_arms, reads_prompts
from router.policies import make_policy
from router.security.security import check_security
from router.settings import Settings, SettingsError
from router.store.mooncake_client import is_installed
from router.tokens import find_tokenizer
from router.tracing.setup import check_tracing


def check(settings: Settings) -> None:
    """Raises SettingsError."""
    _check_tokenizer(settings)
    _check_store(settings)
    make_policy(settings)
    make_arms(settings)
    check_mode(settings)
    check_security(settings)
    check_tracing(settings.otlp_traces_endpoint)


def _check_tokenizer(settings: Settings) -> None:
    """A stated tokenizer must be there; SettingsError says what is wrong. (Found ones are looked for later.)"""
    if reads_prompts(settings) and settings.tokenizer not in {"auto", "engine"}:
        find_tokenizer(settings.tokenizer, (), None)


def _check_store(settings: Settings) -> None:
    """SettingsError when copies are wanted that cannot be asked for."""
    if settings.store and settings.store.copy and not is_installed():
        raise SettingsError(
            "the store's copy= needs Mooncake's client here: pip install mooncake-transfer-engine "
            "(without CUDA: mooncake-transfer-engine-non-cuda)"
        )
