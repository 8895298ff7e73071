"""Choosing a backend."""

from __future__ import annotations

import dataclasses

import pytest

from kernels.backend import REFERENCE, select_backend

CPU = select_backend("cpu", "cpu")


def test_auto_takes_the_best_for_the_device() -> None:
    assert select_backend("cpu") is CPU
    assert select_backend("cuda:1") is REFERENCE


def test_named_backend_is_taken() -> None:
    assert select_backend("cpu", "reference") is REFERENCE
    assert select_backend("cpu", "cpu") is CPU


@pytest.mark.parametrize(("device", "name"), [("cuda", "cpu"), ("cpu", "warp")])
def test_backend_that_cannot_run_is_refused_with_the_possible_ones(device: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' cannot run on device '{device}'; possible are auto, .*reference"):
        select_backend(device, name)


def test_unknown_device_is_refused_with_the_possible_ones() -> None:
    with pytest.raises(ValueError, match="'tpu'; possible are cpu, cuda"):
        select_backend("tpu")


def test_backends_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CPU.name = "other"  # type: ignore[misc]
