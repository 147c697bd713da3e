"""The operations of `kernels.host` in tensor operations, for any device, without waiting for the host."""

__all__: list[str] = []
