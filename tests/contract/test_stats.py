"""Numbers to log: what `stats()` adds to TorchRL's entries."""

import pytest
import torch
from contract.make import assemble, library, make
from contract.steps import Player, rows, write
from tensordict import TensorDict


@pytest.mark.parametrize("write_episodes", [[4, 1, 7, 5], [2], []], ids=["wrapped", "one", "none"])
def test_stats_count_episodes_and_ages_of_stored_transitions(place, write_episodes):
    storage = make(place=place, lanes=2, size=24)
    players = [Player(0), Player(1)]
    write(storage, [players[0].play(write_episodes, 3), players[1].play([2])])
    stats, listed = storage.stats(), storage.episodes.table()
    ages = [age for lane in (0, 1) for age in range(listed["length"][listed["lane"] == lane].sum())]
    assert stats["episodes"] == len(listed)
    assert stats["oldest_age"] == max(ages)
    assert stats["mean_age"] == pytest.approx(sum(ages) / len(ages))
    assert stats["size"] == len(ages)
    stored = TensorDict({"index": storage.episodes.live_slots()}, [len(ages)])
    assert sorted(storage.explain(stored)["age"].tolist()) == sorted(ages)
    assert all(type(value) in (int, float, bool) for value in stats.values())


def test_stats_of_an_empty_buffer_are_zero():
    stats = make("prioritized").stats()
    names = {"episodes", "oldest_age", "mean_age", "sample_calls", "samples_returned"}
    names |= {"largest_priority", "mean_priority"}
    assert {stats[name] for name in names} == {0}
    assert not {"largest_priority", "mean_priority"} & make().stats().keys()


def test_stats_count_sampled_batches():
    storage = make("prioritized", batch_size=8)
    storage.extend(rows(Player().play([4])))
    storage.sample()
    storage.sample(5)
    assert len(storage.sample_episodes(2)) == 2
    library.ReplayStorageEnsemble(storage, batch_size=3).sample()
    stats = storage.stats()
    assert (stats["sample_calls"], stats["samples_returned"]) == (4, 8 + 5 + 2 * 4 + 3)


def test_stats_of_priorities_change_no_sample(place):
    storage, other = (make("prioritized", place=place, size=8, batch_size=8) for _ in range(2))
    for one in (storage, other):
        index = one.extend(rows(Player().play([4])))
        one.update_priority(index[:3], torch.tensor([0.5, 3.0, 0.25]))
    stats = storage.stats()
    # The last one has the largest priority so far, 1 when it was written.
    assert (stats["largest_priority"], stats["mean_priority"]) == (3.0, 4.75 / 4)
    assert torch.equal(storage.sample()["index"], other.sample()["index"])


def test_stats_count_transitions_of_sequences():
    storage = assemble(sample_unit=library.EpisodeSequence(4))
    storage.extend(rows(Player().play([9])))
    storage.sample(2)
    assert storage.stats()["samples_returned"] == 8
