"""What a rank says about its start. Plain data: a driver that reads it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from workers.batch.kv_plan import KVCacheLedger

# Added to the limit of a step, so that a more specific error can come first: that of a collective,
# whose clock started later.
GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What `Worker.start` came to on one rank. `seconds` holds the time of each phase by name."""

    rank: int
    backend: str
    seconds: dict[str, float]
    num_kv_blocks: int
    ledger: KVCacheLedger
    checkpoint: str = ""  # changes when the files of the checkpoint do
