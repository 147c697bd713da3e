"""A recurrent Q-network with stored states in a plain loop: CartPole without velocities.

    python tutorials/stored_states.py             # trains for 20,000 steps

`sample_unit=` expands each sampled transition into a sequence. The recurrent state before each step is
stored as an extra field, which `record` reads from the infos, so the network starts from the state that
the agent had at the first transition of a sequence.
"""

import copy
from collections.abc import Callable, Sequence

import gymnasium
import numpy as np
import torch
from options import parse
from tensordict import TensorDictBase
from torch import Tensor, nn

from trl_storages import EpisodeSequence, UniformReplayStorage

HIDDEN, FIRST_UPDATE, ANNEALED, DISCOUNT = 64, 600, 5_000, 0.99
UNIT = EpisodeSequence(length=16, bootstrap=1)


class Network(nn.Module):
    """Action values from positions and angles, without velocities."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(2, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 2)

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Maps `[B, T, 4]` and `[B, 64]` to values `[B, T, 2]` and the next state `[B, 64]`."""
        features, state = self.gru(obs[..., ::2], state.unsqueeze(0))
        return self.head(features), state.squeeze(0)


def update(
    network: Network,
    target_network: Network,
    optimizer: torch.optim.Optimizer,
    batch: TensorDictBase,
) -> None:
    """Learns from a batch of sequences."""
    sequences = batch.reshape(-1, UNIT.num_steps)
    first_state = sequences["state"][:, 0]
    value, _ = network(sequences["observation"], first_state)
    with torch.no_grad():
        target_value, _ = target_network(sequences["observation"], first_state)
    target, mask = UNIT.targets(sequences, target_value.amax(-1), discount=DISCOUNT)
    chosen = value.gather(-1, sequences["action"].unsqueeze(-1)).squeeze(-1)[:, : UNIT.length]
    optimizer.zero_grad()
    nn.functional.mse_loss(chosen[mask], target[mask]).backward()
    optimizer.step()


def train(
    steps: int, seed: int = 0
) -> tuple[float, UniformReplayStorage, Callable[[TensorDictBase], Tensor]]:
    """Trains for some steps.

    Returns:
        the mean return of the last 20 episodes, the replay buffer, and the greedy actions of transitions.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    env = gymnasium.make("CartPole-v1")
    network = Network()
    target_network = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    buffer = UniformReplayStorage.from_env(
        env,
        batch_size=32,
        sample_unit=UNIT,
        extra_fields={"state": (torch.float32, [HIDDEN])},
        seed=seed,
    )
    returns, total = [], 0.0
    obs, state = env.reset(seed=seed)[0], torch.zeros(1, HIDDEN)
    for step in range(steps):
        with torch.no_grad():
            value, next_state = network(torch.as_tensor(obs)[None, None], state)
        explores = rng.random() < max(0.05, 1 - step / ANNEALED)
        action = int(rng.integers(2)) if explores else int(value.argmax())
        next_obs, reward, terminated, truncated, info = env.step(action)
        info["state"] = state[0]
        buffer.record(obs, action, reward, terminated, truncated, info, next_obs)
        obs, state, total = next_obs, next_state, total + float(reward)
        if terminated or truncated:
            returns.append(total)
            obs, state, total = env.reset()[0], torch.zeros(1, HIDDEN), 0.0
        if step >= FIRST_UPDATE and step % 2 == 0:
            update(network, target_network, optimizer, buffer.sample())
            if step % 200 == 0:
                target_network.load_state_dict(network.state_dict())

    @torch.no_grad()
    def greedy(transitions: TensorDictBase) -> Tensor:
        return network(transitions["observation"][:, None], transitions["state"])[0][:, 0].argmax(
            -1
        )

    return float(np.mean(returns[-20:])), buffer, greedy


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(__doc__, argv, minimum=100, steps=20_000)
    mean_return, _, _ = train(args.steps, args.seed)
    print(f"the last 20 episodes return {mean_return:.0f} on average")
    return mean_return


if __name__ == "__main__":
    main()
