"""What the compile test compiles: one list `CASES` per module, by topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHIPS = (80, 90, 100)
# For kernels without matrix products, which need few registers and little shared memory and differ
# little from chip to chip. They have run on sm_90 (docs/kernels.md).
CHIPS_NOT_RUN_ON = (80, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """One specialization of a kernel as its wrapper launches it.

    `signature` gives the Triton type of every parameter in order, "constexpr" for those of
    `constexprs`. `chips`: those it is launched on.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    chips: tuple[int, ...] = CHIPS


def compile_case(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    default: str = "i32",
    **launch: Any,
) -> CompileCase:
    """`types`: of parameters by name; those that are neither there nor constants are `default`."""
    types = types | dict.fromkeys(constexprs, "constexpr")
    signature = {parameter: types.get(parameter, default) for parameter in kernel.arg_names}
    return CompileCase(
        name=name, kernel=kernel, signature=signature, constexprs=constexprs, **launch
    )
