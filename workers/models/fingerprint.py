"""Whether a checkpoint is still the one that an engine began with.

Two hashes. `fingerprint` is quick and the same on every machine with the same files: it compares
nodes at the start. `LoadedWeightsHash` covers every byte of weights that a rank loads, while it
loads them: it compares epochs, so that a replacement rank never computes with other weights.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash
from torch import Tensor

# Samples of each file of weights, evenly spaced; the first one holds the header, which names all
# tensors.
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 65536
# What decides the meaning of weights. Ranks need no other file, and a node may lack them.
_CONFIG = "config.json"
# Tensors that may wait to be hashed; each may be a copy in host memory.
_MAX_PENDING = 8


def fingerprint(model_dir: Path) -> str:
    """A hash of names and sizes of the weight files, of some of their content, and of config.json:
    the same on every machine that has the same checkpoint, and as quick to compute for a large
    checkpoint as for a small one.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(model_dir.glob("*.safetensors*")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for part in range(_NUM_SAMPLES):
                file.seek(size * part // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    config = model_dir / _CONFIG
    digest.update(config.read_bytes() if config.is_file() else b"")
    return digest.hexdigest()


class LoadedWeightsHash:
    """A hash of the weights of one rank, in the order in which they are loaded, computed by a
    thread of its own (about 9 GB/s on one core of Zen 4). Use as a context: `hexdigest` is known at
    its end.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._executor = ThreadPoolExecutor(1, "hash")
        self._pending_futures: deque[Future[None]] = deque()

    def __enter__(self) -> LoadedWeightsHash:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._executor.shutdown(cancel_futures=kind is not None)
        if kind is None:
            self.wait()

    def add(self, values: Tensor) -> None:
        """Add values in host memory, which must stay as they are until `wait`."""
        data = values.contiguous().flatten().view(torch.uint8).numpy().data
        if len(self._pending_futures) == _MAX_PENDING:
            self._pending_futures.popleft().result()
        self._pending_futures.append(self._executor.submit(self._digest.update, data))

    def wait(self) -> None:
        """Wait until all values are added."""
        while self._pending_futures:
            self._pending_futures.popleft().result()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
