"""A sample unit: each sampled transition becomes a sequence of its episode or lane.

Letters: B anchors, S transitions of a sequence.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.sample_units import Sequence

from trl_storages import keys, validation
from trl_storages.storage import PackedStorage, StorageView

__all__ = ["Boundary", "EpisodeSequence"]

Boundary = Literal["pad", "fit", "cross"]

# Value of `boundary` -> TorchRL's value of `episode_boundary`.
_TORCHRL_BOUNDARIES = {"pad": "pad", "fit": "stop", "cross": "include_reset"}


class EpisodeSequence(Sequence):  # type: ignore[misc]
    """Expands each sampled transition, the anchor, into a sequence of consecutive transitions.

    An anchor at step t becomes the S = `burn_in + length + bootstrap` transitions of steps

        [t - burn_in, t + length + bootstrap)

    in time order. A batch of B anchors becomes `[B * S]` transitions; `batch.reshape(-1, S)` separates
    the sequences. `boundary` decides about steps outside of the anchor's episode:

    - "pad": repeats the first or last stored transition of the episode, with `validity_mask` False.
    - "fit": shifts the sequence into the episode, by as few steps as possible. A sequence in an episode
      shorter than S is padded: burn-in first, then bootstrap, then the last learning transitions. With
      `bootstrap`, the last transitions of a longer episode, with their rewards and ends, are therefore
      never learning transitions: use "pad" where they matter.
    - "cross": spans the lane's previous and next episodes, as in Dreamer, and pads only where the lane
      has no older or newer transitions. `is_init` marks the first transition of each episode.

    The sampler's fields of the anchor (a priority weight, a goal) are repeated for each transition, so
    a sequence has one goal, even across episodes. Overlapping sequences cost no extra storage.

    The boundaries correspond to TorchRL's `Sequence` with `episode_boundary` "pad", "stop" and
    "include_reset", except that TorchRL never shifts for the burn-in. This unit reads the episode index
    instead of searching all transitions for boundaries after each write, supports several lanes and
    split episodes on any device, and does not synchronise with the host.

    Args:
        length: number of transitions to learn from.
        burn_in: number of transitions before them, to warm up a recurrent state.
        bootstrap: number of transitions after them, for targets; `targets` of n-step returns needs n.
        boundary: what happens at the ends of an episode: "pad", "fit" or "cross".

    Raises:
        ValueError: `length` is below 1, `burn_in` or `bootstrap` below 0, or `boundary` is unknown.

    Reference: Kapturowski et al. 2019 (R2D2) for burn-in; Hafner et al. 2023, Mastering Diverse Domains
    through World Models, arXiv:2301.04104, for streams across episodes.

    >>> EpisodeSequence(8, burn_in=4, bootstrap=1, boundary="pad").num_steps
    13
    """

    def __init__(
        self, length: int, burn_in: int = 0, bootstrap: int = 0, *, boundary: Boundary = "pad"
    ) -> None:
        #: "pad", "fit" or "cross".
        self.boundary: str = validation.choice("boundary", boundary, _TORCHRL_BOUNDARIES)
        super().__init__(
            validation.integer("length", length, at_least=1),
            episode_boundary=_TORCHRL_BOUNDARIES[self.boundary],
            burn_in=validation.integer("burn_in", burn_in),
            bootstrap=validation.integer("bootstrap", bootstrap),
        )

    @property
    def num_steps(self) -> int:
        """S; `batch.reshape(-1, unit.num_steps)[i]` is sequence i."""
        return self.burn_in + self.length + self.bootstrap

    def expand(
        self, anchors: Tensor, info: dict[str, Any], storage: PackedStorage | StorageView
    ) -> tuple[Tensor, dict[str, Any]]:
        """Expands anchors into consecutive sequences.

        TorchRL's recurrent modules read `is_init`. Padding has the `is_init` of the transition that it
        repeats, so that a network which restarts there enters the episode with its first state.

        Args:
            anchors: `[B]` int64 slots of the anchors.
            info: the sampler's fields `[B, ...]`, which are repeated for each transition.
            storage: a storage with an episode index.

        Returns:
            `[B * S]` int64 slots, and the info with further fields:

            - `anchor_index`, `[B * S]` int64: the slot of the anchor;
            - `anchor_generation`, `[B * S]` int64: the time index of the anchor in its lane;
            - `sequence_id`, `[B * S]` int64: 0 .. B - 1;
            - `step_in_sequence`, `[B * S]` int64: 0 .. S - 1;
            - `validity_mask`, `[B * S]` bool: False for padding;
            - `learning_mask`, `[B * S]` bool: True for the `length` transitions after the burn-in;
            - `is_init`, `[B * S, 1]` bool: True for the first transition of an episode.
        """
        S = self.num_steps
        slots, valid, begins = storage.episodes.sequences(
            anchors.numpy(), self.burn_in, S, self.boundary
        )
        expanded = {name: value.repeat_interleave(S, 0) for name, value in info.items()}
        expanded[keys.ANCHOR_INDEX] = anchors.repeat_interleave(S)
        generations = storage.episodes.steps_of(anchors)
        expanded[keys.ANCHOR_GENERATION] = generations.repeat_interleave(S)
        position = torch.arange(slots.size, device="cpu")
        step = position % S
        expanded[keys.SEQUENCE_ID] = position // S
        expanded[keys.STEP_IN_SEQUENCE] = step
        expanded[keys.LEARNING_MASK] = (step >= self.burn_in) & (step < self.burn_in + self.length)
        expanded[keys.VALIDITY_MASK] = torch.from_numpy(valid.reshape(-1))
        expanded[keys.IS_INIT] = torch.from_numpy(begins.reshape(-1, 1))
        return torch.from_numpy(slots.reshape(-1)), expanded

    def targets(
        self, batch: TensorDictBase, values: Tensor, *, discount: float
    ) -> tuple[Tensor, Tensor]:
        """Computes the value targets of the learning transitions, and a mask of the known targets.

            y_t = R_t + γ^m V_{t+m},   or R_t where the m steps end in a terminal state

        R_t is the reward of a transition and m its `steps_to_next_obs`, 1 without n-step returns.
        V_{t+m} comes from the same sequence, so a recurrent network processes each transition once.
        V_{t+m} is unknown where step t+m is beyond the sequence (as when `bootstrap` is below m), is
        padding, or belongs to another episode.

        Args:
            batch: as sampled, `[B * S]`, or `[B, S]`.
            values: V, `[B, length + bootstrap]`, of the observations after the burn-in. For double
                Q-learning: the target network's values of the online network's greedy actions.
            discount: γ in [0, 1]. With n-step returns pass `storage.discount`, with which R_t is summed
                and which a batch does not contain.

        Returns:
            y, `[B, length]`; and a mask, `[B, length]` bool, False where V is unknown or the transition
            is padding.

        Raises:
            KeyError: the batch has no rewards, or does not contain sequences.
            ValueError: the shape of `values` does not match the batch, or the sequences of the batch
                have another length.

        Reference: Kapturowski et al. 2019 (R2D2), section 2.3.
        """
        discount = validation.number("discount", discount, at_least=0, at_most=1)
        validation.tensordict("batch", batch)
        is_valid, begins, reward, is_terminal = (
            self._after_burn_in(batch, key)
            for key in (keys.VALIDITY_MASK, keys.IS_INIT, keys.REWARD, keys.TERMINATED)
        )
        if validation.tensor("values", values).shape != is_valid.shape:
            raise ValueError(
                f"values must be {list(is_valid.shape)}, of the transitions after the burn-in, got "
                f"{list(values.shape)}."
            )
        steps = torch.ones_like(begins, dtype=torch.int64)
        if batch.get(keys.STEPS_TO_NEXT_OBS, None) is not None:
            steps = self._after_burn_in(batch, keys.STEPS_TO_NEXT_OBS)

        reward, is_terminal, steps = (
            column[:, : self.length] for column in (reward, is_terminal, steps)
        )
        next_step = torch.arange(self.length, device=steps.device) + steps
        is_inside = next_step < values.shape[1]
        next_step = next_step.clamp(max=values.shape[1] - 1)
        # The number of beginnings so far numbers the episodes within a sequence.
        episode = begins.cumsum(1)
        is_known = is_inside & is_valid.gather(1, next_step)
        is_known &= episode.gather(1, next_step) == episode[:, : self.length]
        bootstrapped = discount**steps * values.gather(1, next_step)
        # `where`, not a product, because values outside of the episode may be NaN.
        target = reward + torch.where(is_known & ~is_terminal, bootstrapped, 0)
        return target, is_valid[:, : self.length] & (is_terminal | is_known)

    def _after_burn_in(self, batch: TensorDictBase, key: NestedKey) -> Tensor:
        """Returns a field of the batch without the burn-in, `[B, length + bootstrap]`."""
        column = batch.get(key, None)
        if column is None:
            raise KeyError(f"the batch has no {key!r}: pass a batch sampled with this sample_unit.")
        if column.numel() != batch.numel() or batch.shape[-1] % self.num_steps:
            raise ValueError(
                f"batch must be [B * {self.num_steps}] or [B, {self.num_steps}], with one number per "
                f"transition, got {list(batch.shape)}, and {key!r} of {list(column.shape)}."
            )
        return column.reshape(-1, self.num_steps)[:, self.burn_in :]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(length={self.length}, burn_in={self.burn_in}, "
            f"bootstrap={self.bootstrap}, boundary={self.boundary!r})"
        )
