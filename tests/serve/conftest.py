"""One tiny server for the tests that ask nothing special of it."""

from __future__ import annotations

import pytest

from tests.serve import tiny_server


@pytest.fixture(scope="session")
def server():
    with tiny_server.running() as running:
        yield running
