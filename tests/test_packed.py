"""PackedStorage: bit-exact rows, a drop-in for TorchRL's own storages, and writes checked first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from trl_storages.rows import PackedStorage
from trl_storages.writing import EpisodeWriter

FIELDS = {
    ("pixels", "front"): (torch.uint8, (3, 5, 7)),
    ("pixels", "depth"): (torch.float16, (4, 4)),
    ("state", "arm", "joints"): (torch.float64, (3,)),
    ("state", "gripper"): (torch.bool, ()),
    "token": (torch.int64, ()),
    "tiny": (torch.int8, (5,)),
    "short": (torch.int16, (3,)),
    "brain": (torch.bfloat16, (3,)),
    "wave": (torch.complex64, (2,)),
    "action": (torch.int32, (1,)),
    ("next", "reward"): (torch.float32, (1,)),
    ("next", "done"): (torch.bool, (1,)),
}


def random_bits(dtype, shape, generator):
    """Any bit pattern that the dtype has: NaNs, infinities and denormals too."""
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(256, (*shape, size), generator=generator, dtype=torch.uint8)
    if dtype.is_complex:
        return torch.view_as_complex(raw.view(torch.float32))[..., : shape[-1]].reshape(shape)
    return raw.view(dtype).reshape(shape)


def bits(tensor):
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(first, second):
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    assert torch.equal(bits(first), bits(second))


def assert_same_data(first, second):
    assert first.batch_size == second.batch_size
    keys = set(first.keys(True, True))
    assert keys == set(second.keys(True, True))
    for key in keys:
        assert_same_bits(first[key], second[key])


def transitions(num_rows, seed=0, fields=FIELDS):
    generator = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            key: random_bits(dtype, (num_rows, *shape), generator)
            for key, (dtype, shape) in fields.items()
        },
        batch_size=[num_rows],
    )


@pytest.fixture
def make_storage():
    """A factory of empty storages that anybody may write."""
    return PackedStorage


def in_directory(path, max_size=20):
    """A buffer of rows in a directory."""
    return TensorDictReplayBuffer(
        storage=PackedStorage(max_size, scratch_dir=path), writer=EpisodeWriter(), batch_size=4
    )


@pytest.mark.requirement("nested-dtypes")
class TestRoundTrip:
    def test_bit_for_bit(self, make_storage):
        storage, data = make_storage(11), transitions(11)
        storage.set(range(11), data)
        index = torch.tensor([10, 0, 3, 3, 7])
        batch = storage.get(index)
        assert_same_data(batch, data[index])

    @given(
        fields=st.dictionaries(
            st.sampled_from(["a", "b", ("c", "d"), ("c", "e"), ("c", "f", "g"), "h"]),
            st.tuples(
                st.sampled_from([dtype for dtype, _ in FIELDS.values() if not dtype.is_complex]),
                st.lists(st.integers(1, 4), max_size=3).map(tuple),
            ),
            min_size=1,
        ),
        num_rows=st.integers(1, 5),
        seed=st.integers(0, 100),
    )
    def test_any_layout(self, fields, num_rows, seed):
        data = transitions(num_rows, seed, fields)
        storage = PackedStorage(num_rows + 1)
        storage.set(range(num_rows), data)
        index = torch.arange(num_rows).flip(0)
        assert_same_data(storage.get(index), data[index])
        payload = sum(value[0].numel() * value.element_size() for value in data.values(True, True))
        assert storage.row_nbytes >= payload
        assert storage.row_nbytes == storage.rows.shape[1] * 8
        # Padding: at most one alignment gap per field and the last word.
        assert storage.row_nbytes <= payload + 8 * (len(fields) + 1)

    def test_a_batch_is_not_the_storage(self, make_storage):
        storage, data = make_storage(4), transitions(4)
        storage.set(range(4), data)
        batch = storage.get(torch.arange(4))
        for value in batch.values(True, True):
            value.zero_()
        assert_same_data(storage.get(torch.arange(4)), data)

    def test_fields_of_a_batch_do_not_overlap(self, make_storage):
        storage, data = make_storage(4), transitions(4)
        storage.set(range(4), data)
        keys = list(data.keys(True, True))
        for key in keys:
            batch = storage.get(torch.arange(4))
            batch[key].zero_()
            for other in keys:
                if other != key:
                    assert_same_bits(batch[other], data[other])


@pytest.mark.requirement("devices")
class TestRead:
    @pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
    def test_some_fields_of_any_index_shape(self, make_storage, shape):
        storage, data = make_storage(9), transitions(9)
        storage.set(range(9), data)
        index = torch.randint(9, shape, generator=torch.Generator().manual_seed(0))
        keys = [("next", "reward"), ("state", "arm", "joints"), "token"]
        fields = storage.read(index, keys)
        assert list(fields) == keys
        for key in keys:
            assert_same_bits(fields[key], data[key][index])

    def test_a_missing_field_lists_those_there(self, make_storage):
        storage = make_storage(4)
        storage.set(range(4), transitions(4))
        with pytest.raises(KeyError, match=r"velocity[\s\S]*token"):
            storage.read(torch.arange(2), ["velocity"])

    def test_memory_and_disk_give_equal_batches(self, tmp_path):
        data, index = transitions(9), torch.tensor([8, 0, 3, 3])
        memory, disk = PackedStorage(9), in_directory(tmp_path / "rows", 9)
        memory.set(range(9), data)
        disk.extend(data)
        assert_same_data(memory.get(index), disk.storage.get(index))
        assert_same_data(memory.get(2).unsqueeze(0), disk.storage.get(2).unsqueeze(0))
        for some in (slice(2, 5), index.tolist()):
            assert_same_data(memory.get(some), disk.storage.get(some))
        keys = ["glyph", ("next", "done")] if "glyph" in FIELDS else [("next", "done")]
        read = memory.read(index.view(2, 2), keys), disk.storage.read(index.view(2, 2), keys)
        for key in keys:
            assert_same_bits(read[0][key], read[1][key])

    @pytest.mark.gpu
    def test_cuda_gives_equal_batches(self):
        data, index = transitions(9), torch.tensor([8, 0, 3, 3])
        host, device = PackedStorage(9), PackedStorage(9, device="cuda:0")
        host.set(range(9), data)
        device.set(range(9), data.to("cuda:0"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            batch = device.get(index.to("cuda:0", non_blocking=True))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(value.device == torch.device("cuda:0") for value in batch.values(True, True))
        assert_same_data(batch.cpu(), host.get(index))

    @pytest.mark.gpu
    def test_batches_that_cross_to_the_gpu(self):
        data, index = transitions(9), torch.tensor([[8, 0], [3, 3]])
        storage = PackedStorage(9, out_device="cuda:0")
        storage.set(range(9), data)
        batch = storage.get(index)
        assert all(value.device == torch.device("cuda:0") for value in batch.values(True, True))
        assert_same_data(batch.cpu(), data[index])


def buffers(make_storage, max_size=20, **kwargs):
    """The same stock buffer over a stock and over a packed storage."""
    made = []
    for storage in (LazyTensorStorage(max_size), make_storage(max_size)):
        parts = {key: make() for key, make in kwargs.items() if key in ("sampler", "writer")}
        rest = {key: value for key, value in kwargs.items() if key not in parts}
        generator = torch.Generator().manual_seed(3)
        made.append(TensorDictReplayBuffer(storage=storage, generator=generator, **parts, **rest))
    return made


INDEXES = {
    "int": 3,
    "negative": -2,
    "slice": slice(2, 7),
    "strided": slice(0, 8, 3),
    "everything": slice(None),
    "list": [4, 1, 1],
    "range": range(2, 5),
    "tensor": torch.tensor([5, 0, 5]),
    "int32": torch.tensor([5, 0, 5], dtype=torch.int32),
    "negative tensor": torch.tensor([-1, 0, -3]),
    "block": torch.tensor([[5, 0], [2, 2]]),
    "empty": torch.zeros(0, dtype=torch.int64),
}


class TestDropIn:
    """Inside `TensorDictReplayBuffer` nothing but the speed tells it from `LazyTensorStorage`."""

    @pytest.mark.parametrize("num_rows", [9, 33])
    @pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
    def test_indexing(self, make_storage, index, num_rows):
        stock, packed = buffers(make_storage)
        for buffer in (stock, packed):
            for start in range(0, num_rows, 3):
                buffer.extend(transitions(3, seed=start))
        assert len(stock) == len(packed)
        assert_same_data(stock[index], packed[index])

    @pytest.mark.parametrize(
        "sampler",
        [
            RandomSampler,
            SamplerWithoutReplacement,
            lambda: SliceSampler(num_slices=4, end_key=("next", "done"), strict_length=False),
            pytest.param(lambda: PrioritizedSampler(20, 0.6, 0.4), marks=pytest.mark.native),
        ],
        ids=["random", "without replacement", "slices", "prioritized"],
    )
    @pytest.mark.parametrize("writer", [TensorDictRoundRobinWriter, RoundRobinWriter])
    def test_same_draws(self, make_storage, sampler, writer):
        drawn = []
        for buffer in buffers(make_storage, sampler=sampler, writer=writer, batch_size=16):
            torch.manual_seed(0)
            for seed in range(5):
                buffer.extend(transitions(7, seed))
            drawn.append([buffer.sample() for _ in range(4)])
        for stock, packed in zip(*drawn, strict=True):
            assert_same_data(stock, packed)

    def test_dumps_and_loads(self, make_storage, tmp_path):
        _, packed = buffers(make_storage, batch_size=16)
        packed.extend(transitions(20, seed=1))
        packed.extend(transitions(5, seed=2))
        packed.dumps(tmp_path / "dumped")
        _, reloaded = buffers(make_storage, batch_size=16)
        reloaded.loads(tmp_path / "dumped")
        self.assert_goes_on_alike(packed, reloaded)

    def assert_goes_on_alike(self, packed, reloaded):
        assert len(packed) == len(reloaded)
        for seed in range(4):
            assert_same_data(packed[:], reloaded[:])
            for buffer in (packed, reloaded):
                buffer.set_rng(torch.Generator().manual_seed(seed))
            assert_same_data(packed.sample(), reloaded.sample())
            for buffer in (packed, reloaded):
                buffer.extend(transitions(3, seed))

    def test_empty(self, make_storage):
        _, packed = buffers(make_storage, batch_size=4)
        packed.extend(transitions(9))
        packed.empty()
        assert len(packed) == 0
        packed.extend(transitions(2, seed=8))
        assert len(packed) == 2
        assert_same_data(packed[:].exclude("index"), transitions(2, seed=8))

    def test_assigning_rows(self, make_storage):
        stock, packed = buffers(make_storage)
        for buffer in (stock, packed):
            buffer.extend(transitions(9))
            row = buffer[torch.tensor([1, 4])].clone()
            buffer[torch.tensor([7, 0])] = row
        assert_same_data(stock[:], packed[:])


class TestErrors:
    @pytest.mark.parametrize(
        ("slots", "num_rows"),
        [
            (torch.tensor([5, 6, 7]), 2),
            (torch.tensor([5, 6, 7]), 1),
            (torch.tensor([5]), 3),
            (range(5, 8), 1),
            (slice(5, 8), 1),
            ([5, 6, 7], 1),
        ],
    )
    def test_another_number_of_rows_than_slots(self, make_storage, slots, num_rows):
        storage = make_storage(8)
        storage.set(range(5), transitions(5))
        rows = storage.rows.clone()
        with pytest.raises(ValueError, match="slots"):
            storage.set(slots, transitions(num_rows, seed=1))
        assert torch.equal(storage.rows, rows)
        assert len(storage) == 5

    @pytest.mark.parametrize("slots", [range(7, 9), slice(7, 9), [0, 8]])
    def test_slots_beyond_the_end(self, make_storage, slots):
        storage = make_storage(8)
        storage.set(range(5), transitions(5))
        rows = storage.rows.clone()
        with pytest.raises((IndexError, ValueError)):
            storage.set(slots, transitions(2, seed=1))
        assert torch.equal(storage.rows, rows)
        assert len(storage) == 5

    def test_reading_before_the_first_write(self, make_storage):
        with pytest.raises(RuntimeError):
            make_storage(4).get(torch.zeros(1, dtype=torch.int64))

    def test_an_existing_directory_is_not_overwritten(self, tmp_path):
        first = in_directory(tmp_path, 4)
        first.extend(transitions(4))
        before = first.storage.rows.clone()
        with pytest.raises((RuntimeError, ValueError, FileExistsError), match="rows"):
            PackedStorage(4, scratch_dir=tmp_path)
        assert torch.equal(first.storage.rows, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer, value: buffer.set_("number", value),
        lambda buffer, value: buffer.set_at_("number", value, torch.arange(5)),
        lambda buffer, value: buffer.update_(TensorDict({"number": value}, [5])),
    ],
)
def test_torchrls_buffers_write_in_place(change):
    buffer = TensorDictReplayBuffer(storage=PackedStorage(8), batch_size=2)
    buffer.extend(TensorDict({"number": torch.zeros(5, 2)}, [5]))
    value = torch.rand(5, 2)
    change(buffer, value)
    assert torch.equal(buffer.storage.get(torch.arange(5))["number"], value)
