"""Everything that is gymnasium's own: spaces, and the steps of a plain loop with its autoresets."""

from trl_storages.gym.fields import transition_fields
from trl_storages.gym.recorder import GymRecorder

__all__ = ["GymRecorder", "transition_fields"]
