"""Replay storages for TorchRL: hindsight, n-step, priorities and recency at sample time."""
