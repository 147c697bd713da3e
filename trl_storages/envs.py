"""The bit-flipping environment of hindsight experience replay (HER), registered with gymnasium on import.

Letters: B batch (any leading shape), n number of bits.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import ArrayLike, NDArray

from trl_storages import validation

__all__ = ["BitFlippingEnv"]


class BitFlippingEnv(gymnasium.Env[Any, Any]):
    """Flips bits until they equal the goal, with a sparse reward.

    State and goal are n bits each, drawn uniformly and never equal at the start. The reward is 0 if the
    state equals the goal after the step, and -1 otherwise. An episode is *terminated* on success and
    *truncated* after n steps; the last step can be both, as with `gymnasium.wrappers.TimeLimit`. With
    many bits, random actions never reach the goal, so all rewards are equal. HER learns nevertheless,
    because it replaces the goal with a state that was reached.

    - Observation: a dictionary of `observation` and `achieved_goal` (both the bits) and
      `desired_goal`, each `[n]` float32 of 0 and 1, ready for networks.
    - Discrete action: which bit to flip.
    - Continuous action, `[n]` float32 in [-1, 1]: the **largest** component selects the bit to flip (the
      first of equal ones). A step flips one bit, as with discrete actions, so n steps are just enough to
      reach any goal. If every positive component flipped its bit, each state could be reached from any
      state in one step, and HER would have no future states to choose goals from.
    - Info: `is_success` and `num_steps` since the reset.

    In a process that has not imported this package, the ID is "trl_storages:BitFlipping-v0".

    Args:
        n_bits: number of bits n, which is also the time limit and the number of discrete actions.
        continuous: whether actions are vectors `[n]` instead of the number of a bit.

    Raises:
        ValueError: `n_bits` is not a positive integer.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495, section 3.1.

    >>> env = gymnasium.make("BitFlipping-v0", n_bits=3)
    >>> before, _ = env.reset(seed=0)
    >>> after, reward, terminated, truncated, info = env.step(2)
    >>> before["observation"] != after["observation"]
    array([False, False,  True])
    """

    def __init__(self, n_bits: int = 15, *, continuous: bool = False) -> None:
        self.n_bits = n_bits = validation.integer("n_bits", n_bits, at_least=1)
        self.continuous = validation.flag("continuous", continuous)
        bits = Box(0.0, 1.0, (n_bits,), np.float32)
        self.observation_space = Dict(observation=bits, achieved_goal=bits, desired_goal=bits)
        self.action_space = Box(-1.0, 1.0, (n_bits,)) if continuous else Discrete(n_bits)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        """Draws new bits and a goal that differs from them; ignores `options`."""
        super().reset(seed=seed)
        self._num_steps = 0
        # Both are drawn again, so that the pair is uniform over all unequal pairs.
        while True:
            bits = self.np_random.integers(0, 2, (2, self.n_bits)).astype(np.float32)
            self._state, self._goal = bits
            if not np.array_equal(self._state, self._goal):
                return self._observation(), self._info()

    def step(
        self, action: Any
    ) -> tuple[dict[str, NDArray[np.float32]], float, bool, bool, dict[str, Any]]:
        """Flips one bit.

        Raises:
            ValueError: `action` is not the number of a bit, or not n finite numbers.
        """
        bit = self._bit(action)
        self._state[bit] = 1.0 - self._state[bit]
        self._num_steps += 1
        info = self._info()
        reward = float(self.compute_reward(self._state, self._goal, info))
        truncated = bool(self.compute_truncated(self._state, self._goal, info))
        return self._observation(), reward, info["is_success"], truncated, info

    def compute_reward(self, achieved_goal: ArrayLike, desired_goal: ArrayLike, info: Any) -> Any:
        """Returns the rewards of achieved goals `[B, n]` for desired goals `[B, n]`.

        Returns:
            `[B]` float32, 0 where all n bits are equal and -1 elsewhere; `info` is ignored.
        """
        is_success = self.compute_terminated(achieved_goal, desired_goal, info)
        return is_success.astype(np.float32) - np.float32(1.0)

    def compute_terminated(
        self, achieved_goal: ArrayLike, desired_goal: ArrayLike, info: Any
    ) -> Any:
        """Returns `[B]` bool, whether the goal is reached, which ends the episode."""
        return (np.asarray(achieved_goal) == np.asarray(desired_goal)).all(axis=-1)

    def compute_truncated(
        self, achieved_goal: ArrayLike, desired_goal: ArrayLike, info: Any
    ) -> Any:
        """Returns `[B]` bool, whether `info["num_steps"]` has reached the time limit n.

        Truncation does not depend on the goals, so relabelling never changes it.
        """
        return np.asarray(info["num_steps"]) >= self.n_bits

    def _bit(self, action: Any) -> int:
        values, n_bits = np.asarray(action), self.n_bits
        if self.continuous:
            if values.shape == (n_bits,) and np.isfinite(values).all():
                return int(values.argmax())
        elif values.size == 1 and values.dtype.kind in "iu" and 0 <= values.item() < n_bits:
            return int(values.item())
        discrete = f"the number of a bit, 0 to {n_bits - 1}"
        expected = f"{n_bits} finite numbers" if self.continuous else discrete
        raise ValueError(
            f"action must be {expected}, got {action!r}; for "
            f"{'discrete' if self.continuous else 'continuous'} actions pass "
            f"continuous={not self.continuous}."
        )

    def _observation(self) -> dict[str, NDArray[np.float32]]:
        # Copies, because the next step changes the state in place.
        state, goal = self._state.copy(), self._goal.copy()
        return {"observation": state, "achieved_goal": state.copy(), "desired_goal": goal}

    def _info(self) -> dict[str, Any]:
        is_success = np.array_equal(self._state, self._goal)
        return {"is_success": is_success, "num_steps": self._num_steps}


# Registering again, as when the module is reloaded, would warn.
if "BitFlipping-v0" not in gymnasium.registry:
    gymnasium.register(
        id="BitFlipping-v0",
        entry_point="trl_storages.envs:BitFlippingEnv",
        kwargs={"n_bits": 15, "continuous": False},
    )
