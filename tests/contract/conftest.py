"""Storages of every place, one place at a time."""

from __future__ import annotations

import pytest
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
