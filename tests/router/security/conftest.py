"""Workers as the proxy's tests have them."""

from tests.router.proxy.conftest import a, b, pytest_asyncio_loop_factories

__all__ = ["a", "b", "pytest_asyncio_loop_factories"]
