"""What the tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.select import select_backend


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let the CPU kernels divide their work between two threads, as on the smallest machine."""
    kernels = select_backend("cpu", "cpu")
    kernels.set_num_threads(2)
    yield
    kernels.set_num_threads(1)
