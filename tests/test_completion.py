"""Completion in editors and notebooks: public attributes and returns of the classes have types."""

import ast
import inspect
import textwrap

import pytest

import trl_storages
from trl_storages import PackedStorage, ReplayStorage
from trl_storages.storage import StorageView

CLASSES = [
    it for name in trl_storages.__all__ if inspect.isclass(it := getattr(trl_storages, name))
]


def annotations_of(cls):
    """Yields name and annotation of attributes and methods, except settings, which check their values."""
    for node in ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body:
        is_setting = "Setting" in ast.unparse(getattr(node, "value", None) or [])
        if isinstance(node, ast.AnnAssign) and not is_setting:
            yield node.target.id, node.annotation
        if isinstance(node, ast.FunctionDef):
            yield node.name, node.returns
            for it in ast.walk(node):
                if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Attribute):
                    yield it.target.attr, it.annotation


@pytest.mark.parametrize("cls", [*CLASSES, StorageView])
def test_public_attributes_and_returns_have_types(cls):
    untyped = [
        f"{kind.__name__}.{name}"
        for kind in cls.__mro__
        if kind.__module__.startswith("trl_storages")
        for name, annotation in annotations_of(kind)
        if name[0] != "_" and (annotation is None or "Any" in ast.unparse(annotation).split(" | "))
    ]
    assert not untyped


def test_dir_of_replay_storage_lists_public_names_that_work():
    names = dir(ReplayStorage(storage=PackedStorage(10)))
    assert {"record", "extend", "sample", "episodes", "explain", "n_step", "write_count"} <= {
        *names
    }
    assert {"set_storage", "query", "register_save_hook"}.isdisjoint(names)
    assert not [name for name in names if name[0] == "_"]
