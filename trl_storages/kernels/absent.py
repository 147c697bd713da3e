"""What stands for a priority where there is none."""

__all__ = ["ABSENT"]

#: The priority of a slot without a row. It is never drawn, and never the least.
ABSENT = float("inf")
