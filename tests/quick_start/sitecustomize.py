"""Runs first in each Python process that a test starts: most of their time would go into imports.

Garbage collections would walk the half a million objects of torch and TorchRL again and again.
"""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)
