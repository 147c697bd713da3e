"""A recurrent Q-network from TorchRL's modules, with a collector, priorities of sequences and burn-in.

    python tutorials/gru_collector.py             # CartPole-v1, trains for 6,000 steps

The primer of TorchRL's `GRUModule` adds the recurrent state to the environment. Append it before the
replay buffer is created: the buffer stores only the fields of the environment. `DQNLoss` restarts the
network from zeros for the next observations; the burn-in warms up this run as well. Gradients flow
through the burn-in, unlike in R2D2 and `recurrent.py`.
"""

from collections.abc import Callable, Sequence

import torch
from options import parse
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import EGreedyModule, GRUModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate

from trl_storages import EpisodeSequence, PrioritizedReplayStorage, sequence_priority

HIDDEN, FRAMES, UPDATES, ANNEALED = 64, 100, 25, 3_000
UNIT = EpisodeSequence(length=12, burn_in=4, boundary="fit")


def train(
    steps: int, seed: int = 0
) -> tuple[float, PrioritizedReplayStorage, Callable[[TensorDictBase], Tensor]]:
    """Trains for some steps.

    Returns:
        the mean return of the last 20 episodes, the replay buffer, and the greedy actions of transitions.
    """
    torch.manual_seed(seed)
    gru = GRUModule(
        input_size=4,
        hidden_size=HIDDEN,
        in_keys=["observation", "state"],
        out_keys=["features", ("next", "state")],
    )
    head = TensorDictModule(torch.nn.Linear(HIDDEN, 2), ["features"], ["action_value"])
    policy = TensorDictSequential(gru, head, QValueModule("categorical"))
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), InitTracker())
    env.append_transform(gru.make_tensordict_primer())
    env.set_seed(seed)
    explore = EGreedyModule(env.action_spec, annealing_num_steps=ANNEALED)
    buffer = PrioritizedReplayStorage.from_env(env, sample_unit=UNIT, batch_size=32, seed=seed)
    loss = DQNLoss(policy, action_space="categorical", delay_value=True, reduction="none")
    loss.make_value_estimator(gamma=0.99)
    target_updater = SoftUpdate(loss, tau=0.02)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    collector = Collector(
        env, TensorDictSequential(policy, explore), frames_per_batch=FRAMES, total_frames=steps
    )
    for data in collector:
        buffer.extend(data)
        explore.step(data.numel())
        for _ in range(UPDATES):
            batch = buffer.sample()
            sequences = batch.reshape(-1, UNIT.num_steps)
            with set_recurrent_mode(True):
                losses = loss(sequences)["loss"]
            mask = sequences["learning_mask"] & sequences["validity_mask"]
            optimizer.zero_grad()
            losses[mask].mean().backward()
            optimizer.step()
            target_updater.step()
            priority = sequence_priority(sequences["td_error"].squeeze(-1), mask=mask)
            buffer.update_tensordict_priority(batch, priority)
    collector.shutdown()
    table = buffer.episodes.table()
    mean_return = float(table["length"][table["finished"]][-20:].float().mean())

    @torch.no_grad()
    def greedy(transitions: TensorDictBase) -> Tensor:
        return policy(transitions.clone())["action"]

    return mean_return, buffer, greedy


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(__doc__, argv, minimum=100, steps=6_000)
    mean_return, _, _ = train(args.steps, args.seed)
    print(f"the last 20 episodes return {mean_return:.0f} on average")
    return mean_return


if __name__ == "__main__":
    main()
