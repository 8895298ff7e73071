"""What a rank says about its start. Plain data: a driver that reads it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from workers.batch.kv_plan import KVCacheLedger

# Beyond the limit of a step, for an error that says more: that of a collective, which began later.
GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What `Worker.start` came to on one rank. `seconds` holds the time of each phase by name."""

    rank: int
    backend: str
    seconds: dict[str, float]
    num_kv_blocks: int
    ledger: KVCacheLedger
