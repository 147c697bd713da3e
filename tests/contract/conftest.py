"""Storages of every place, one place at a time."""

from __future__ import annotations

import pytest
from contract import writers
from contract.make import PLACES

from trl_storages.storage import memory as packed


@pytest.fixture(autouse=True)
def _setting_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make` chooses ends with the test."""
    monkeypatch.setattr(packed, "HOSTS", packed.HOSTS)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    """Where rows are."""
    return request.param


@pytest.fixture(params=["goals", "compressed"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Layout of what other processes write."""
    monkeypatch.setattr(writers, "LAYOUT", request.param)
    return request.param
