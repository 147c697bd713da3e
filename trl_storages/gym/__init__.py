"""Support for gymnasium: spaces, and the steps of a plain loop with its autoreset modes."""

from trl_storages.gym.fields import transition_fields
from trl_storages.gym.recorder import GymRecorder
from trl_storages.gym.values import choices_of

__all__ = ["GymRecorder", "choices_of", "transition_fields"]
