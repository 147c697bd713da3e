"""Replay storages for TorchRL: hindsight, n-step, priorities and recency at sample time."""

# Imported for what it registers: the test environments.
import trl_storages.envs  # noqa: F401
