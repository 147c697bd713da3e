"""The package as a whole: its names, its layers, and what it takes from inside other libraries."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest
from importlinter.cli import lint_imports
from numba.core.caching import FunctionCache
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    RayReplayBuffer,
    TensorDictReplayBuffer,
    Writer,
)
from torchrl.envs import CatTensors, Compose, GymWrapper

import trl_storages
from trl_storages import torchrl_compat
from trl_storages.torchrl_compat import UNSUPPORTED

PACKAGE = Path(trl_storages.__file__).parent
MODULES = ["trl_storages"] + [
    module.name for module in pkgutil.walk_packages([str(PACKAGE)], "trl_storages.")
]


def test_there_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", trl_storages.__version__)


def test_type_checkers_read_the_annotations():
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("name", MODULES)
def test_modules_list_what_is_public(name):
    module = importlib.import_module(name)

    public = getattr(module, "__all__", ())

    assert len(set(public)) == len(public)
    own = {
        key
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == name
        and (inspect.isroutine(value) or inspect.isclass(value))
    }
    assert {key for key in own if not key.startswith("_")} <= {*public}


def test_arrows_point_down_only():
    config = Path(__file__).parents[1] / "pyproject.toml"

    assert lint_imports(config_filename=str(config), no_cache=True) == 0


# What the package takes from inside TorchRL and tensordict: a release that changes it fails here.

#: Owner -> attributes and methods that the package uses, of which `_torchrl.py` speaks.
PRIVATE_ATTRIBUTES = {
    owner: re.findall(r"`(_\w+)`", names)
    for owner, names in re.findall(r"^- `(\w+)`:((?:\s+`_\w+`,?)+)$", torchrl_compat.__doc__, re.M)
}

#: One instance of each class that a private name belongs to.
OWNERS = {
    "ReplayBuffer": lambda buffer: buffer,
    # Made with an actor only: what its constructor sets.
    "RayReplayBuffer": lambda _: SimpleNamespace(
        **dict.fromkeys(RayReplayBuffer.__init__.__code__.co_names)
    ),
    "TensorStorage": lambda buffer: buffer.storage,
    "Writer": lambda buffer: buffer.writer,
    "Sampler": lambda buffer: buffer.sampler,
    "CatTensors": lambda _: CatTensors(["a", "b"], out_key="c"),
    "Compose": lambda _: Compose(),
    "FunctionCache": lambda _: FunctionCache(lint_imports),
    "TensorDict": lambda buffer: buffer[:],
    "GymWrapper": lambda _: GymWrapper(gymnasium.make("BitFlipping-v0", n_bits=2)),
}


@pytest.mark.parametrize("owner", PRIVATE_ATTRIBUTES)
def test_private_names_exist(owner):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(TensorDict({"observation": [0.0]}, [1]))
    instance = OWNERS[owner](buffer)

    assert [name for name in PRIVATE_ATTRIBUTES[owner] if not hasattr(instance, name)] == []


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (TensorDict._new_unsafe, {"source", "batch_size", "nested"}),
        (LazyTensorStorage._empty, {"self"}),
        (LazyTensorStorage._rand_given_ndim, {"self", "batch_size"}),
        (Writer._empty, {"self", "empty_write_count"}),
        (RandomSampler._empty, {"self"}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_private_methods_take_what_they_are_given(method, arguments):
    assert arguments <= set(inspect.signature(method).parameters)


#: What storages have of TorchRL's buffers as it is there.
INHERITED = {
    *("as_remote", "batch_size", "client", "dump", "initialized", "is_alive", "load", "next"),
    *("sampler", "save", "service_backend", "start", "storage", "transform"),
    *("update_if_present", "write_count", "writer"),
}


def test_all_that_torchrls_buffers_have_is_theirs_too_or_refused():
    """A release that adds something fails here: it is to work, or to be refused."""
    kinds = trl_storages.ReplayStorage.__mro__
    own = {
        name for kind in kinds if kind.__module__.startswith("trl_storages.") for name in vars(kind)
    }
    public = {name for name in dir(TensorDictReplayBuffer) if name[0] != "_"}

    assert public - own >= INHERITED
    assert {*UNSUPPORTED} - {"as_dataset", "export"} <= public  # which TorchRL 0.15 adds
    assert public - own == INHERITED


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_makes_no_sense_over_lanes_is_refused(name):
    storage = trl_storages.ReplayStorage(storage=trl_storages.PackedStorage(4))
    with pytest.raises(RuntimeError, match=f"no {name}"):
        getattr(storage, name)()


def test_every_private_name_of_others_is_listed():
    listed = {name for names in PRIVATE_ATTRIBUTES.values() for name in names}
    named_tuple = {"_asdict", "_fields", "_replace"}  # public, in spite of the underscore
    used, own = {}, set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name) if re.match(r"_[^_]", name):
                    used[name] = f"{path}:{node.lineno}"

    assert {name: at for name, at in used.items() if name not in own | listed | named_tuple} == {}


@pytest.mark.parametrize("name", trl_storages.__all__)
def test_every_public_name_has_an_example(name):
    assert ">>> " in inspect.getdoc(getattr(trl_storages, name))
