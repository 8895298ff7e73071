from pathlib import Path

import pytest

from tests.workers.batch.graph_pair import MakeRunner


@pytest.fixture(scope="session")
def make(small_checkpoint: Path) -> MakeRunner:
    return MakeRunner(small_checkpoint)
