"""What a rank reports about its start. Plain data: a driver that reads it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from workers.batch.kv_plan import KVCacheLedger

# Added to the time limit of a step, twice in the driver, so that a more specific error can come
# first: that of a collective operation, whose limit starts to count later.
STEP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """The outcome of `Worker.start` on one rank. `seconds` holds the time of each phase by name.

    backend: how the log names the kernels. num_kv_blocks: how many this rank could hold; all get
    the minimum. checkpoint_hash: of samples of the checkpoint's files, equal where these are.
    weights_hash: of the weights of this rank. compute_platform: see `workers.processor`.
    """

    rank: int
    backend: str
    seconds: dict[str, float]
    num_kv_blocks: int
    ledger: KVCacheLedger
    checkpoint_hash: str = ""
    weights_hash: str = ""
    compute_platform: str = ""
