"""What takes long shows how far it is, when asked to."""

import builtins

import pytest
from disk.rows import found, make, write
from trl_storages.disk import words
from trl_storages.saved import files

from trl_storages import ReplayStorage


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """As if there were many gigabytes."""
    monkeypatch.setattr(words, "_PIECE", 500)
    monkeypatch.setattr(files, "_PIECE", 500)


@pytest.fixture
def storage(tmp_path):
    storage = make(tmp_path / "rows", 2, with_priorities=False)
    write(storage, 31)
    return storage


def test_opening_and_checking(storage, capsys):
    path = storage.storage.scratch_dir
    storage.close()
    ReplayStorage.open(path, check=True).close()
    assert capsys.readouterr().err == ""
    again = ReplayStorage.open(path, check=True, progress=True)
    said = capsys.readouterr().err
    assert "opening rows:   0%" in said
    assert "| 0/10 " in said
    assert found(again) == found(storage)
    again.validate(progress=True)
    assert "checking rows:   0%" in capsys.readouterr().err
    assert again.episodes.episodes()["length"].tolist() == (
        storage.episodes.episodes()["length"].tolist()
    )
    reader = ReplayStorage.open(path, mode="r", progress=True, batch_size=4)
    assert "opening rows:   0%" in capsys.readouterr().err
    assert found(reader) == found(again)
    reader.sample()
    assert capsys.readouterr().err == ""


def test_lanes_of_unequal_fill_in_pieces(tmp_path):
    storage = make(tmp_path, 4, 40)
    for step in range(25):
        write(storage, 1 + step % 3, [step % 4, (step + 1 + step % 2) % 4])
    expected = found(storage)
    storage.close()
    assert found(make(tmp_path, 4, 40)) == expected


def test_copying(storage, tmp_path, capsys):
    storage.dumps(tmp_path / "dump")
    assert capsys.readouterr().err == ""
    storage.dumps(tmp_path / "dump", progress=True)
    assert "saving rows:   0%" in capsys.readouterr().err
    other = make(tmp_path / "other", 2, with_priorities=False)
    write(other, 1)
    other.loads(tmp_path / "dump", progress=True)
    assert "loading rows:   0%" in capsys.readouterr().err
    assert found(other) == found(storage)
    storage.dumps(tmp_path / "dump")
    assert capsys.readouterr().err == ""


def test_a_dump_that_could_not_begin_leaves_the_one_before(storage, tmp_path, monkeypatch):
    storage.dumps(tmp_path / "dump")

    def refuse():
        raise RuntimeError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(storage.sampler, "state_dict", refuse)
        with pytest.raises(RuntimeError, match="not now"):
            storage.dumps(tmp_path / "dump")
    other = make(tmp_path / "other", 2, with_priorities=False)
    other.loads(tmp_path / "dump")
    assert found(other) == found(storage)


def test_without_tqdm(storage, tmp_path, monkeypatch):
    really = builtins.__import__

    def missing(name, *args):
        if name == "tqdm":
            raise ImportError(name)
        return really(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    for long in (storage.validate, lambda **options: storage.dumps(tmp_path / "dump", **options)):
        with pytest.raises(ImportError, match="pip install tqdm"):
            long(progress=True)
    assert not (tmp_path / "dump" / "storage").exists()
