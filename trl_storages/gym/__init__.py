"""Support for gymnasium: spaces, and the steps of a plain loop with its autoreset modes."""

from trl_storages.gym.fields import choices_of, transition_fields
from trl_storages.gym.recorder import GymRecorder

__all__ = ["GymRecorder", "choices_of", "transition_fields"]
