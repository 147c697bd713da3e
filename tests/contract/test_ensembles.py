"""Several storages drawn as one: exact shares, weights over the batch, priorities."""

import math

import pytest
import torch
from contract.lanes import Lanes, ends
from contract.make import assemble, library
from contract.steps import Player, ids_of, reward_fn, rows

GoalRelabel, HERSampler, NStep = library.GoalRelabel, library.HERSampler, library.NStep


@pytest.mark.requirement("ensembles")
class TestEnsembles:
    def members(self, place="memory", **parts):
        storages = [assemble(40, seed=seed, place=place, **parts) for seed in (1, 2)]
        # Each environment is in the first lane of its own storage.
        steps = [Player().play([5, 5, 5]), Player(5).play([9, 9])]
        for storage, its in zip(storages, steps, strict=True):
            storage.extend(rows(its))
        return storages, steps

    @pytest.mark.parametrize(
        ("shares", "batch_size", "counts"),
        [
            ((0.5, 0.5), 9, [5, 4]),
            ((0.9, 0.1), 20, [18, 2]),
            (None, 8, [4, 4]),
            ((0, 1), 6, [0, 6]),
        ],
    )
    def test_shares_are_exact_and_spread_evenly(self, place, shares, batch_size, counts):
        """As in RLPD: of a fixed part of the batch each storage draws what it would draw alone."""
        storages, steps = self.members(place)
        alone = [
            ids_of(storage.sample(max(n, 1))).tolist()
            for storage, n in zip(self.members(place)[0], counts, strict=True)
        ]
        ensemble = library.ReplayStorageEnsemble(*storages, shares=shares, batch_size=batch_size)
        assert len(ensemble) == sum(map(len, steps))
        batch = ensemble.sample()
        found = ids_of(batch)
        number = (found >= 1 << 20).long()
        assert torch.equal(batch["buffer_ids"], number)
        assert torch.bincount(number, minlength=2).tolist() == counts
        due = torch.arange(1, batch_size + 1) * counts[1] / batch_size
        assert (number.cumsum(0) - due).abs().max() <= 1
        for i, expected in enumerate(alone):
            assert found[number == i].tolist() == expected[: counts[i]]

    def test_each_is_seen_through_its_own_transforms(self):
        offline = assemble(40, transform=NStep(3, 0.5))
        relabel = GoalRelabel(reward_fn, info_keys=["effort"])
        online = assemble(40, sampler=HERSampler("final", math.inf), transform=[relabel, NStep(1)])
        Lanes(40).write(offline, [ends([9, 9])])
        lanes = Lanes(40)
        lanes.write(online, [ends([9, 9])])
        batch = library.ReplayStorageEnsemble(offline, online, batch_size=40).sample()
        is_online = batch["buffer_ids"] == 1
        assert torch.equal(batch["her_mask"], is_online)
        assert (batch["steps_to_next_obs"][is_online] == 1).all()
        assert (batch["steps_to_next_obs"][~is_online] == 3).any()
        part = batch[is_online]
        assert lanes.reaching(part["desired_goal"]) == [
            lanes.onward(step)[-1] for step in lanes.of(part)
        ]
        assert (batch[~is_online]["desired_goal"][:, 1] == -1).all()

    def test_priorities_go_back_to_where_their_rows_are(self, place):
        per = [library.PERSampler(40, alpha=1.0, beta=1.0, eps=1e-9) for _ in range(2)]
        storages = [assemble(40, sampler=sampler, place=place) for sampler in per]
        lanes = Lanes(40)
        lanes.write(storages[0], [ends([5, 5, 5])])
        storages[1].extend(rows(lanes.live()))
        ensemble = library.ReplayStorageEnsemble(*storages, batch_size=400)
        batch = ensemble.sample()
        steps, numbers = lanes.of(batch), batch["buffer_ids"]
        priority = torch.tensor([1.0 + step.id % 5 for step in steps]) + 3.0 * numbers
        ensemble.update_tensordict_priority(batch, priority)
        batch = ensemble.sample()
        raw = (
            torch.tensor([1.0 + step.id % 5 for step in lanes.of(batch)])
            + 3.0 * batch["buffer_ids"]
        )
        # Each row's chance in its own storage, times its number of rows; the largest weight is 1.
        means = torch.tensor(
            [sum(1.0 + step.id % 5 for step in lanes.live()) / 15 + 3.0 * n for n in (0, 1)]
        )
        weight = means[batch["buffer_ids"]] / raw
        torch.testing.assert_close(batch["priority_weight"], weight / weight.max())

    @pytest.mark.parametrize("normalize", ["batch", "storage", "none"])
    @pytest.mark.parametrize("windowed", [False, True])
    def test_weights_are_of_all_of_the_batch(self, normalize, windowed):
        """Uniform draws weigh 1; by priority (N P)^-beta, within a window of its rows alone."""
        per = library.PERSampler(40, alpha=0.7, beta=0.6, eps=1e-9, normalize=normalize)
        sampler = library.ERESampler(0.9, c_min=6, base=per) if windowed else per
        storages, lanes = [assemble(40), assemble(40, sampler=sampler)], Lanes(40)
        lanes.write(storages[0], [ends([5, 5, 5])])
        steps = lanes.live()
        index = storages[1].extend(rows(steps))
        storages[1].update_priority(index, torch.arange(1.0, 16.0))
        raw = {step: number**0.7 for number, step in enumerate(steps, start=1)}
        if windowed:
            sampler.begin_phase(1)
            raw = {step: raw[step] for step in lanes.newest(6)}
        batch = library.ReplayStorageEnsemble(*storages, batch_size=64).sample()
        mean = sum(raw.values()) / len(raw)
        weight = torch.tensor(
            [
                (mean / raw[step]) ** 0.6 if number else 1.0
                for step, number in zip(lanes.of(batch), batch["buffer_ids"], strict=True)
            ]
        )
        expected = weight / weight.max()
        torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-4, atol=1e-6)

    def test_batches_explain_and_one_generator(self):
        drawn = []
        for seed in (5, 5, 6):
            storages, _ = self.members()
            ensemble = library.ReplayStorageEnsemble(
                *storages, batch_size=8, generator=torch.Generator().manual_seed(seed)
            )
            batches = [*ensemble.batches(2, 6, epochs=2)]
            assert [batch.shape for batch in batches] == [(6,)] * 4
            said = ensemble.explain(batches[-1])
            assert torch.equal(said["storage"], batches[-1]["buffer_ids"])
            assert len(said["step"]) == 6
            drawn.append(torch.cat([ids_of(batch) for batch in batches]).tolist())
        assert drawn[0] == drawn[1] != drawn[2]

    @pytest.mark.requirement("live-parameters")
    def test_shares_may_change(self):
        storages, _ = self.members()
        ensemble = library.ReplayStorageEnsemble(*storages, batch_size=10)
        for shares in ((0.1, 0.9), (0.7, 0.3)):
            ensemble.shares = shares
            counts = torch.bincount(ensemble.sample()["buffer_ids"], minlength=2)
            assert counts.tolist() == [round(10 * share) for share in shares]
        for wrong in ((0.5,), (0.6, 0.6), (-1, 2), "half", None):
            with pytest.raises((TypeError, ValueError)):
                ensemble.shares = wrong
        assert ensemble.can_sample()

    def test_sequences_stay_whole(self, place):
        storages, _ = self.members(place, sample_unit=library.EpisodeSequence(2, burn_in=1))
        ensemble = library.ReplayStorageEnsemble(*storages, shares=(0.25, 0.75), batch_size=8)
        batch = ensemble.sample().reshape(8, 3)
        assert (batch["buffer_ids"] == batch["buffer_ids"][:, :1]).all()
        assert batch["buffer_ids"][:, 0].tolist().count(0) == 2
        assert (batch["sequence_id"] == torch.arange(8).unsqueeze(1)).all()
