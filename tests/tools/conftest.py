"""Fixtures that several tools' tests use."""

from tests.servers.conftest import stand_in  # noqa: F401
