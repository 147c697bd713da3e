"""Parameters of a storage's parts, read and set on the storage itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload, runtime_checkable

from trl_storages._torchrl import ReplayBufferMeta
from trl_storages.other_names import METHOD_NAMES, meant
from trl_storages.priorities import Normalization
from trl_storages.samplers import GoalStrategy, layers_of
from trl_storages.transforms import parts_of

__all__ = ["Parameter", "Parameters"]

Value = TypeVar("Value")
Made = TypeVar("Made")


@runtime_checkable
class _Adjustable(Protocol):
    """A sampler or transform with parameters that may change between samples."""

    #: Name on the storage -> attribute of the part, which checks what it is set to.
    live_parameters: Mapping[str, str]


class Parameter(Generic[Value]):
    """An attribute of a storage that is one of its sampler's or transform's."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, storage: None, owner: type) -> Parameter[Value]: ...
    @overload
    def __get__(self, storage: Parameters, owner: type) -> Value: ...
    def __get__(self, storage: Parameters | None, owner: type) -> Parameter[Value] | Value:
        if storage is None:
            return self
        return getattr(*storage._holder_of(self._name))

    def __set__(self, storage: Parameters, value: Value) -> None:
        with storage._replay_lock:
            setattr(*storage._holder_of(self._name), value)


class _Settled(ReplayBufferMeta):
    """Makes storages that take no new attributes once they are made."""

    # Type checkers then ask the constructor.
    def __call__(cls: type[Made], *args: Any, **options: Any) -> Made:  # noqa: N805
        storage = super().__call__(*args, **options)  # type: ignore[misc]
        # Where it is made in another process, this is not one.
        if issubclass(type(storage), cls):
            storage._is_settled = True
        return storage


class Parameters(metaclass=_Settled):
    """The part of `ReplayStorage` that passes parameters on to sampler and transforms.

    A new value holds for the next batch that is drawn. It is checked where it lives. A parameter that no
    part has can't be read or set, nor can an attribute be set that is not there: a subclass names its own
    in its constructor.
    """

    # Of TorchRL's ReplayBuffer.
    _sampler: Any
    _transform: Any
    _replay_lock: Any

    _is_settled = False

    n_step = Parameter[int]("n of the n-step returns, of `NStep`.")
    discount = Parameter[float]("gamma of the n-step returns, of `NStep`.")
    alpha = Parameter[float]("How strongly priorities count, of `PERSampler`.")
    beta = Parameter[float]("How far importance weights correct for priorities, of `PERSampler`.")
    normalize = Parameter[Normalization]("Whose largest weight is 1, of `PERSampler`.")
    eps = Parameter[float]("What is added to priorities, of `PERSampler`.")
    eta = Parameter[float]("Recency strength, of `ERESampler`.")
    c_min = Parameter[int]("The smallest window of recent rows, of `ERESampler`.")
    num_goals = Parameter[float]("Relabelled transitions for each one as stored, of `HERSampler`.")
    strategy = Parameter[GoalStrategy]("Where goals come from, of `HERSampler`.")

    def _adjustable(self) -> Iterator[_Adjustable]:
        """Lists the parts with parameters."""
        parts = [*layers_of(self._sampler), *parts_of(self._transform)]
        return (part for part in parts if isinstance(part, _Adjustable))

    def _holder_of(self, name: str) -> tuple[_Adjustable, str]:
        """Returns the part that has a parameter, and what it calls it.

        Raises:
            AttributeError: no part has it.
        """
        there: set[str] = set()
        for part in self._adjustable():
            if name in part.live_parameters:
                return part, part.live_parameters[name]
            there.update(part.live_parameters)
        raise AttributeError(
            f"this {type(self).__name__} has no part with {name}, it has "
            f"{', '.join(sorted(there)) or 'no parameters'}: name {name} where the storage is made, or "
            "give it the sampler or transform."
        )

    # Type checkers would take any attribute then.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in METHOD_NAMES and not hasattr(type(self), name):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}: it is {METHOD_NAMES[name]} here."
                )
            # A name that nobody knows; or a property raised this, and does so again.
            return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_new = name not in self.__dict__ and not hasattr(type(self), name)
        if is_new and self._is_settled and not name.startswith("_"):
            kind = type(self)
            names = [known for known in dir(kind) if not callable(getattr(kind, known))]
            names = [known for known in (*names, *self.__dict__) if known[0] != "_"]
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; {meant(name, names)}"
            )
        super().__setattr__(name, value)
