"""The version that a server reports."""

from __future__ import annotations

import importlib.metadata
from typing import NoReturn

import pytest

from cluster.serve.replica import installed_version


def test_a_checkout_that_is_not_installed_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert installed_version() == "not installed"
