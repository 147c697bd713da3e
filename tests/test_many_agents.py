"""Several agents in a row: each agent's rewards are folded by themselves, against a plain loop."""

import pytest
import torch
from oracles import RingOracle
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage
from torchrl.objectives.value import TD0Estimator

from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
)

pytestmark = pytest.mark.requirement("many-agents")

AGENTS, LANES, GAMMA = 3, 2, 0.9
REWARD, DONE = ("next", "agents", "reward"), ("next", "agents", "done")


def steps_of_agents(num_steps, seed=0, *, own_ends=True):
    """Steps `[E, T]`; every entry says which lane, step and agent it is of."""
    generator = torch.Generator().manual_seed(seed)
    lane, step = torch.meshgrid(torch.arange(LANES), torch.arange(num_steps), indexing="ij")
    done = (torch.rand(LANES, num_steps, 1, generator=generator) < 0.1) & (step > 2).unsqueeze(-1)
    ended = torch.rand(LANES, num_steps, AGENTS, 1, generator=generator) < 0.15
    ended = ended | done.unsqueeze(-2)
    terminal = ended & (torch.rand(ended.shape, generator=generator) < 0.5)

    def coded(kind):
        agent = torch.arange(AGENTS).expand(LANES, num_steps, AGENTS)
        parts = [torch.full_like(agent, kind), lane.unsqueeze(-1).expand_as(agent)]
        return torch.stack([*parts, step.unsqueeze(-1).expand_as(agent), agent], -1).float()

    agents = {"observation": coded(0)}
    following = {
        "observation": coded(1),
        "reward": torch.rand(LANES, num_steps, AGENTS, 1, generator=generator),
        # Of all agents together, though it lies among theirs.
        "state": step.unsqueeze(-1).float(),
    }
    if own_ends:
        following |= {"done": ended, "terminated": terminal, "truncated": ended & ~terminal}
    return TensorDict(
        {
            "agents": TensorDict(agents, [LANES, num_steps]),
            "next": {
                "agents": TensorDict(following, [LANES, num_steps]),
                "state": step.unsqueeze(-1).float(),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
        },
        [LANES, num_steps],
    )


def make(data, *, capacity=40, storage_type=PackedStorage, **parts):
    """A storage that got these steps, and the model of what must be there."""
    buffer = ReplayStorage(
        storage=storage_type(capacity),
        writer=EpisodeWriter(LANES, on_gap="ignore"),
        generator=torch.Generator().manual_seed(0),
        **parts,
    )
    oracle, done = RingOracle(capacity, LANES), data["next", "done"].squeeze(-1)
    for start in range(0, data.shape[1], 17):
        buffer.extend(data[:, start : start + 17])
        oracle.append(done[:, start : start + 17].tolist())
    return buffer, oracle


def assert_folded(batch, data, oracle, n_steps):
    """Every sample is what a loop over the rows of its episode says, agent by agent."""
    live, reward = oracle.live(), batch[REWARD]
    assert batch["steps_to_next_obs"].shape == reward.shape
    for i, slot in enumerate(batch["index"].tolist()):
        row = live[slot]
        window = [each for each in oracle.episode(row) if each.step >= row.step][:n_steps]
        stored = [data[each.lane, each.step] for each in window]
        assert torch.equal(batch["agents", "observation"][i], stored[0]["agents", "observation"])
        for agent in range(AGENTS):
            total, length = 0.0, 0
            for rows in stored:
                total += GAMMA**length * rows[REWARD][agent].item()
                length += 1
                if DONE in rows.keys(True) and rows[DONE][agent]:
                    break
            last = stored[length - 1]["next", "agents"]
            assert batch["steps_to_next_obs"][i, agent].item() == length
            assert reward[i, agent].item() == pytest.approx(total, rel=1e-6)
            for key in ("observation", "done", "terminated", "truncated"):
                if key in last.keys():  # noqa: SIM118
                    assert torch.equal(batch["next", "agents", key][i, agent], last[key][agent]), (
                        key
                    )
        # What is of the row is that of the last one of the window, whoever has ended before.
        for key in ("state", ("agents", "state"), "done", "terminated"):
            assert torch.equal(batch["next"][key][i], stored[-1]["next"][key])


@pytest.mark.requirement("n-step")
@pytest.mark.parametrize("storage_type", [PackedStorage, LazyTensorStorage])
@pytest.mark.parametrize("own_ends", [False, True])
@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_each_agent_is_folded_by_itself(n_steps, own_ends, storage_type):
    data = steps_of_agents(60, own_ends=own_ends)
    transform = NStep(n_steps, GAMMA, reward_key=REWARD)
    buffer, oracle = make(data, transform=transform, storage_type=storage_type)
    batch = buffer.sample(150)
    assert_folded(batch, data, oracle, n_steps)
    stored = buffer.storage.get(batch["index"])
    assert torch.equal(batch["agents", "observation"], stored["agents", "observation"])


def test_by_hand():
    """Four steps, of which the second ends the first agent alone; rewards 1 and 10."""
    done = torch.tensor([[[0], [0]], [[1], [0]], [[1], [0]], [[1], [1]]]).bool()
    agents = {"reward": torch.tensor([[1.0], [10.0]]).expand(4, 2, 1), "done": done}
    root = torch.tensor([[0], [0], [0], [1]]).bool()
    buffer = ReplayStorage(
        storage=PackedStorage(4), transform=NStep(3, 0.5, reward_key=REWARD), batch_size=40
    )
    buffer.extend(TensorDict({"next": {"agents": agents, "done": root}}, [4]))
    batch = buffer.sample()
    expected = {0: [1.5, 17.5], 1: [1.0, 17.5], 2: [1.0, 15.0], 3: [1.0, 10.0]}
    lengths = {0: [2, 3], 1: [1, 3], 2: [1, 2], 3: [1, 1]}
    for slot, reward, length, ended in zip(
        batch["index"].tolist(),
        batch[REWARD].squeeze(-1).tolist(),
        batch["steps_to_next_obs"].squeeze(-1).tolist(),
        batch[DONE].squeeze(-1).tolist(),
        strict=True,
    ):
        assert (reward, length) == (expected[slot], lengths[slot])
        assert ended == [True, slot > 0]


@pytest.mark.parametrize("last", [(AGENTS,), (AGENTS, 1), (2, 3)])
@pytest.mark.parametrize("own_ends", [False, True])
def test_rewards_and_flags_of_other_names_and_shapes(last, own_ends):
    """At the root, with or without a last dimension of 1, of agents in two dimensions."""
    generator = torch.Generator().manual_seed(3)
    done = (torch.arange(30) % 11 == 10).unsqueeze(-1)
    reward, ended = torch.rand(30, *last), torch.rand(30, *last, generator=generator) < 0.3
    following = {"reward": reward, "done": done, "ends": ended}
    transform = NStep(4, GAMMA, agent_done_key=("next", "ends") if own_ends else None)
    buffer = ReplayStorage(storage=PackedStorage(30), transform=transform, batch_size=60)
    buffer.extend(TensorDict({"next": following}, [30]))
    batch = buffer.sample()
    assert batch["steps_to_next_obs"].shape == (60, *last)
    for i, slot in enumerate(batch["index"].tolist()):
        until = slot - slot % 11 + 11
        for agent in range(reward[0].numel()):
            total, length = 0.0, 0
            for step in range(slot, min(slot + 4, until, 30)):
                total += GAMMA**length * reward[step].flatten()[agent].item()
                length += 1
                if own_ends and ended[step].flatten()[agent]:
                    break
            assert batch["steps_to_next_obs"][i].flatten()[agent].item() == length
            got = batch["next", "reward"][i].flatten()[agent].item()
            assert got == pytest.approx(total, rel=1e-6)


@pytest.mark.requirement("n-step-target")
def test_torchrls_target_of_each_agent():
    """TD(0) bootstraps each agent with its own power of γ, and not past its own terminal state."""
    data = steps_of_agents(60)
    buffer, oracle = make(data, transform=NStep(3, GAMMA, reward_key=REWARD))
    values = TensorDictModule(
        lambda observation: 100 + observation.sum(-1, keepdim=True),
        in_keys=[("agents", "observation")],
        out_keys=[("agents", "state_value")],
    )
    estimator = TD0Estimator(gamma=GAMMA, value_network=values)
    estimator.set_keys(
        value=("agents", "state_value"),
        reward=REWARD[1:],
        done=DONE[1:],
        terminated=("agents", "terminated"),
    )
    batch = buffer.sample(100)
    target = estimator.value_estimate(batch)
    live = oracle.live()
    for i, slot in enumerate(batch["index"].tolist()):
        row = live[slot]
        window = [each for each in oracle.episode(row) if each.step >= row.step][:3]
        for agent in range(AGENTS):
            expected = 0.0
            for m, each in enumerate(window):
                stored = data[each.lane, each.step]["next", "agents"]
                expected += GAMMA**m * stored["reward"][agent].item()
                if stored["done"][agent] or each is window[-1]:
                    if not stored["terminated"][agent]:
                        value = 100 + stored["observation"][agent].sum().item()
                        expected += GAMMA ** (m + 1) * value
                    break
            assert target[i, agent].item() == pytest.approx(expected, rel=1e-5)


def test_root_done_alone_ends_a_lane():
    data = steps_of_agents(15)
    buffer, oracle = make(data)
    for slot, row in oracle.live().items():
        at = torch.tensor([slot])
        assert buffer.episodes.ahead(at).item() == oracle.ahead(row)
        assert buffer.episodes.behind(at).item() == oracle.behind(row)


@pytest.mark.requirement("per-update")
def test_priorities_and_sequences_of_agents():
    data = steps_of_agents(60)
    per = PERSampler(40, alpha=1.0)
    unit = EpisodeSequence(2, bootstrap=1, boundary="cross")
    buffer, oracle = make(
        data, sampler=per, sample_unit=unit, transform=NStep(3, GAMMA, reward_key=REWARD)
    )
    batch = buffer.sample(20)
    assert_folded(batch, data, oracle, 3)
    error = torch.rand(60, AGENTS, 1)
    batch["td_error"] = error
    buffer.update_tensordict_priority(batch.reshape(20, 3))
    expected = torch.ones(40)
    for i, line in enumerate(batch.reshape(20, 3)):
        learnt = line["validity_mask"] & line["learning_mask"]
        expected[line["anchor_index"][0]] = error.view(20, 3, AGENTS)[i][learnt].max()
    assert torch.equal(per.priorities, expected)
    for seen in (batch, batch.reshape(20, 3)):
        explained = buffer.explain(seen)
        assert len(explained) == 60
        assert torch.equal(explained["steps"], batch["steps_to_next_obs"].squeeze(-1))
    first = "/".join(map(str, explained["steps"][0].tolist()))
    assert first in str(explained).split("\n")[2].split()


@pytest.mark.requirement("devices")
def test_nothing_waits_for_the_gpu(gpu):
    buffer = ReplayStorage(
        storage=PackedStorage(40, device=gpu),
        writer=EpisodeWriter(LANES, on_gap="ignore"),
        transform=NStep(3, GAMMA, reward_key=REWARD),
    )
    buffer.extend(steps_of_agents(10).to(gpu))
    batch = buffer.sample(8)
    assert batch["steps_to_next_obs"].shape == batch[REWARD].shape == (8, AGENTS, 1)
    assert all(value.device == gpu for value in batch.values(True, True))


def test_flags_of_another_shape_raise():
    data = steps_of_agents(10)
    data[DONE] = data[DONE][..., 0]
    buffer, _ = make(data, transform=NStep(3, reward_key=REWARD))
    with pytest.raises(
        ValueError, match=r"done'\) must have the shape \[4, 3, 1\], .* got \[4, 3\]"
    ):
        buffer.sample(4)
    with pytest.raises(ValueError, match="agent_done_key must lie under 'next', got 'done'"):
        NStep(agent_done_key="done")
