"""Runs the few instructions of inline assembly, which Triton's interpreter does not have, by what
the PTX ISA says of them. Words are numbers of 32 bits.
"""

import re

import torch
from torch import Tensor


def run_ptx(program: str, dtype: torch.dtype, words: dict[str, int]) -> dict[str, int]:
    """All registers afterwards. `words`: the inputs, by their names. dtype: of the pairs."""
    registers = dict(words)

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for name, operands in re.findall(r"^([a-z]\S+) (.*);$", program, re.MULTILINE):
        target, *sources = operands.split(", ")
        numbers = [value(source) for source in sources]
        if name == "mov.b32":
            registers[target] = numbers[0]
        elif name == "shr.u32":
            registers[target] = numbers[0] >> numbers[1]
        elif name == "shl.b32":
            registers[target] = numbers[0] << numbers[1] & 0xFFFFFFFF
        elif name == "and.b32":
            registers[target] = numbers[0] & numbers[1]
        elif name == "prmt.b32":
            registers[target] = permuted(*numbers)
        elif name == "lop3.b32":
            a, b, c, table = numbers
            registers[target] = sum(
                (table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) & 1) << bit
                for bit in range(32)
            )
        else:
            assert name == {torch.bfloat16: "fma.rn.bf16x2", torch.float16: "fma.rn.f16x2"}[dtype]
            x, y, z = (numbers_of(bits, dtype).double() for bits in numbers)
            registers[target] = bits_of((x * y + z).to(dtype))
    return registers


def permuted(a: int, b: int, selector: int) -> int:
    """`prmt.b32`: each digit of the selector chooses a byte of b:a, or, with 8 added, its sign in
    all bits.
    """
    bytes_ = [(b << 32 | a) >> 8 * place & 0xFF for place in range(8)]
    result = 0
    for place in range(4):
        digit = selector >> 4 * place & 0xF
        chosen = bytes_[digit & 7]
        result |= (0xFF * (chosen >> 7) if digit & 8 else chosen) << 8 * place
    return result


def numbers_of(bits: int, dtype: torch.dtype) -> Tensor:
    """The two numbers of 16 bits, the lower half first."""
    return torch.tensor([bits], dtype=torch.uint32).view(dtype)


def bits_of(numbers: Tensor) -> int:
    return int(numbers.view(torch.uint32).item())
