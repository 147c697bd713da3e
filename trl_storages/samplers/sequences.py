"""Sample units: expand a drawn row into a sequence of its episode or lane.

Letters: B anchors, S rows of a sequence.
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

# Ways in which a sequence is kept within an episode, and what TorchRL calls them.
_THEIR_NAMES = {"pad": "pad", "fit": "stop", "cross": "include_reset"}


class EpisodeSequence(Sequence):  # type: ignore[misc]
    """Expands each drawn row into a sequence, which stays within its episode unless told otherwise.

    An anchor at step t becomes the S = `burn_in + length + bootstrap` rows of steps

        [t - burn_in, t + length + bootstrap)

    in time order. A batch of B anchors becomes `[B * S]` rows; `batch.reshape(-1, S)` separates them.
    `boundary` decides about steps outside of the anchor's episode:

    - "pad": repeats the first or last surviving row, with `validity_mask` False.
    - "fit": shifts the sequence by as little as keeps it within the episode. An episode shorter than S
      is padded, at the expense of burn-in first, then bootstrap, then the last learning rows. With
      `bootstrap`, the last rows of a longer episode are therefore never learning rows, nor are the
      rewards and ends that they hold: use "pad" where these matter.
    - "cross": continues into the lane's previous and next episodes, as in Dreamer, and pads only where
      the lane has no older or newer rows. `is_init` marks where another episode begins.

    The sampler's entries for the anchor (a priority weight, a goal) are repeated for each of its rows,
    so a sequence has one goal, even across episodes. Rows are gathered by index: overlapping sequences
    cost no extra storage.

    As TorchRL's `Sequence` with `episode_boundary` "pad", "stop" and "include_reset", but that one never
    shifts for the burn-in. It uses the episode index instead of searching all rows for boundaries after
    each write, and works with several lanes and cut episodes, on any device, without synchronising with
    the host.

    Args:
        length: rows to learn from.
        burn_in: rows before them, to warm up a recurrent state.
        bootstrap: rows after them, for targets; `targets` of n-step returns needs n of them.
        boundary: what to do at the ends of an episode: "pad", "fit" or "cross".

    Raises:
        ValueError: `length` is below 1, `burn_in` or `bootstrap` below 0, or there is no such boundary.

    Reference: Kapturowski et al. 2019 (R2D2) for burn-in; Hafner et al. 2023, Mastering Diverse Domains
    through World Models, arXiv:2301.04104, for streams across episodes.

    >>> EpisodeSequence(8, burn_in=4, bootstrap=1, boundary="pad").num_steps
    13
    """

    def __init__(
        self, length: int, burn_in: int = 0, bootstrap: int = 0, *, boundary: Boundary = "pad"
    ) -> None:
        #: "pad", "fit" or "cross".
        self.boundary: str = validation.choice("boundary", boundary, _THEIR_NAMES)
        super().__init__(
            validation.integer("length", length, at_least=1),
            episode_boundary=_THEIR_NAMES[self.boundary],
            burn_in=validation.integer("burn_in", burn_in),
            bootstrap=validation.integer("bootstrap", bootstrap),
        )

    @property
    def num_steps(self) -> int:
        """S; `batch.reshape(-1, unit.num_steps)` has one sequence per row."""
        return self.burn_in + self.length + self.bootstrap

    def expand(
        self, index: Tensor, info: dict[str, Any], storage: PackedStorage | StorageView
    ) -> tuple[Tensor, dict[str, Any]]:
        """Expands anchors into consecutive sequences.

        Args:
            index: `[B]` int64 slots of the anchors.
            info: the sampler's info; entries `[B, ...]` are repeated for each row.
            storage: a storage with an episode index.

        Returns:
            `[B * S]` int64 slots, and the info with, for each of them, `anchor_index`, the slot of
            the row that was drawn; `sequence_id` in 0 .. B - 1; `step_in_sequence` in 0 .. S - 1;
            `validity_mask`, False for padding; `learning_mask`, whether it is one of the `length` rows
            after the burn-in; and `is_init`, `[B * S, 1]`, whether its episode begins with it, as read
            by TorchRL's recurrent modules. Padding has the `is_init` of the row that it repeats, so a
            network that restarts there enters the episode with its first state.
        """
        S = self.num_steps
        slots, valid, begins = storage.episodes.sequences(
            index.numpy(), self.burn_in, S, self.boundary
        )
        expanded = {name: value.repeat_interleave(S, 0) for name, value in info.items()}
        expanded[keys.ANCHOR_INDEX] = index.repeat_interleave(S)
        place = torch.arange(slots.size, device="cpu")
        step = place % S
        expanded[keys.SEQUENCE_ID] = place // S
        expanded[keys.STEP_IN_SEQUENCE] = step
        expanded[keys.LEARNING_MASK] = (step >= self.burn_in) & (step < self.burn_in + self.length)
        expanded[keys.VALIDITY_MASK] = torch.from_numpy(valid.reshape(-1))
        expanded[keys.IS_INIT] = torch.from_numpy(begins.reshape(-1, 1))
        return torch.from_numpy(slots.reshape(-1)), expanded

    def targets(
        self, batch: TensorDictBase, values: Tensor, *, discount: float
    ) -> tuple[Tensor, Tensor]:
        """Computes the value targets of the learning rows, and a mask of where they are known.

            y_t = R_t + γ^m V_{t+m},   or R_t where the m steps end in a terminal state

        R_t is the reward of a row and m its `steps_to_next_obs`, 1 without n-step returns. V_{t+m} is
        taken from the sequence itself, so a recurrent network runs over each row once. It is unknown
        where row t+m is beyond the sequence (as when `bootstrap` is below m), is padding, or belongs to
        another episode.

        Args:
            batch: as sampled, `[B * S]`, or `[B, S]`.
            values: V, `[B, length + bootstrap]`, of the observations of the rows after the burn-in. For
                double Q-learning: the target network's values of the online network's greedy actions.
            discount: γ in [0, 1]. With n-step returns it must be theirs, `storage.discount`: R_t is
                summed with that one already, and a batch does not hold it.

        Returns:
            y, `[B, length]`; and a mask, `[B, length]`, False where V is unknown or the row itself is
            padding.

        Raises:
            KeyError: the batch has no rewards, or does not hold sequences.
            ValueError: the shape of `values` does not fit the batch, or its sequences have other lengths.

        Reference: Kapturowski et al. 2019 (R2D2), section 2.3.
        """
        discount = validation.number("discount", discount, at_least=0, at_most=1)
        validation.tensordict("batch", batch)
        is_valid, begins, reward, is_over = (
            self._behind_burn_in(batch, key)
            for key in (keys.VALIDITY_MASK, keys.IS_INIT, keys.REWARD, keys.TERMINATED)
        )
        if validation.tensor("values", values).shape != is_valid.shape:
            raise ValueError(
                f"values must be {list(is_valid.shape)}, of the rows behind the burn-in, got "
                f"{list(values.shape)}."
            )
        steps = torch.ones_like(begins, dtype=torch.int64)
        if batch.get(keys.STEPS_TO_NEXT_OBS, None) is not None:
            steps = self._behind_burn_in(batch, keys.STEPS_TO_NEXT_OBS)

        reward, is_over, steps = (column[:, : self.length] for column in (reward, is_over, steps))
        after = torch.arange(self.length, device=steps.device) + steps
        is_inside, after = after < values.shape[1], after.clamp(max=values.shape[1] - 1)
        # Counting beginnings numbers the episodes within a sequence.
        episode = begins.cumsum(1)
        is_there = is_inside & is_valid.gather(1, after)
        is_there &= episode.gather(1, after) == episode[:, : self.length]
        to_come = discount**steps * values.gather(1, after)
        # `where`, not a product: values of rows outside may be NaN.
        target = reward + torch.where(is_there & ~is_over, to_come, 0)
        return target, is_valid[:, : self.length] & (is_over | is_there)

    def _behind_burn_in(self, batch: TensorDictBase, key: NestedKey) -> Tensor:
        """Returns an entry of one number per row as `[B, length + bootstrap]`, without the burn-in."""
        column = batch.get(key, None)
        if column is None:
            raise KeyError(
                f"the batch lacks its entry {key!r}: pass what a storage with this sample_unit drew."
            )
        if column.numel() != batch.numel() or batch.shape[-1] % self.num_steps:
            raise ValueError(
                f"batch must be [B * {self.num_steps}] or [B, {self.num_steps}], with one number a row, "
                f"got {list(batch.shape)}, and {key!r} of {list(column.shape)}."
            )
        return column.reshape(-1, self.num_steps)[:, self.burn_in :]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(length={self.length}, burn_in={self.burn_in}, "
            f"bootstrap={self.bootstrap}, boundary={self.boundary!r})"
        )
