"""What TorchRL's buffers have and a storage of lanes has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["REFUSED", "Refusing"]

#: Method of TorchRL's buffers -> what to do instead.
REFUSED: dict[str, str] = {
    **dict.fromkeys(["set_storage", "set_writer"], "make another ReplayStorage"),
    **dict.fromkeys(
        [
            "set_",
            "set_at_",
            "update_",
            "update_if_present",
            "submit_update_if_present",
            "write_all",
        ],
        "rows are not overwritten, but for values of their steps: use rewrite(index, values)",
    ),
    **dict.fromkeys(
        ["register_save_hook", "register_load_hook"],
        "there are no hooks: change what state_dict() returns",
    ),
    "mark_update": "what is new is seen when a batch is drawn",
    "query": "use episodes.episodes(), and storage[slots]",
    "read_all_in_order": "use storage[:]",
}


class Refusing:
    """Refuses what is inherited and makes no sense over lanes of episodes."""


def _refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"a ReplayStorage has no {name}(): {instead}.")

    refuse.__name__, refuse.__doc__ = name, f"Raises a RuntimeError: {instead}."
    return refuse


for _name, _instead in REFUSED.items():
    setattr(Refusing, _name, _refusing(_name, _instead))
