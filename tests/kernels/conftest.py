"""What the tests of kernels share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels.select import select_backend


@pytest.fixture(autouse=True)
def test_that_breaks_the_gpu_ends_its_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """After an illegal access nothing works on a GPU any more: where pytest-xdist can start another
    process for the next tests, it says which one did it.
    """
    yield
    if torch.cuda.is_initialized() and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{request.node.nodeid}: {error}", file=sys.stderr, flush=True)
            os._exit(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let the CPU kernels divide their work between two threads, as on the smallest machine."""
    kernels = select_backend("cpu", "cpu")
    kernels.set_num_threads(2)
    yield
    kernels.set_num_threads(1)
