"""Test beds, registered with gymnasium when the package is imported.

>>> import gymnasium
>>> gymnasium.make("BitFlipping-v0", n_bits=4, continuous=True).action_space.shape
(4,)
"""

import gymnasium

from trl_storages.envs.bit_flipping import BitFlippingEnv

__all__ = ["BitFlippingEnv"]

# Registering again, as when the module is reloaded, would warn.
if "BitFlipping-v0" not in gymnasium.registry:
    gymnasium.register(
        id="BitFlipping-v0",
        entry_point="trl_storages.envs.bit_flipping:BitFlippingEnv",
        kwargs={"n_bits": 15, "continuous": False},
    )
