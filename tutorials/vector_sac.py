"""SAC with TorchRL's `SACLoss` in a plain loop over four Gymnasium environments.

    python tutorials/vector_sac.py                # Pendulum-v1, a minute on one core

`buffer.record` takes a step of all environments. Outside of a collector an actor of TorchRL is
deterministic, so the loop asks for random actions by `set_exploration_type`.
"""

from collections.abc import Callable, Sequence

import gymnasium
import numpy as np
import torch
from options import parse
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.data import Bounded
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from trl_storages import UniformReplayStorage

NUM_ENVS, FIRST_UPDATE = 4, 50


def make_loss() -> SACLoss:
    """Creates actor, critics and their loss."""
    network = torch.nn.Sequential(MLP(3, 2, num_cells=[64, 64]), NormalParamExtractor())
    spec = Bounded(-2, 2, (1,))
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2, "high": 2},
        spec=spec,
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, action_spec=spec)
    loss.make_value_estimator(gamma=0.95)
    return loss


def train(
    steps: int, seed: int = 0
) -> tuple[float, UniformReplayStorage, Callable[[torch.Tensor], torch.Tensor]]:
    """Trains for some steps of all environments.

    Returns:
        the mean return of the last four episodes, the replay buffer, and the policy without exploration.
    """
    torch.manual_seed(seed)
    envs = gymnasium.make_vec("Pendulum-v1", num_envs=NUM_ENVS, vectorization_mode="sync")
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=4)
    buffer = UniformReplayStorage.from_env(envs, batch_size=128, seed=seed)
    loss = make_loss()
    actor = loss.actor_network
    target_updater = SoftUpdate(loss, tau=0.02)
    optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3)

    def act(obs: torch.Tensor, exploration: ExplorationType) -> torch.Tensor:
        with (
            torch.no_grad(),
            set_exploration_type(exploration),
            loss.actor_network_params.to_module(actor),
        ):
            return actor(TensorDict({"observation": obs}, [len(obs)]))["action"]

    obs, _ = envs.reset(seed=seed)
    for step in range(steps):
        action = act(torch.as_tensor(obs), ExplorationType.RANDOM).numpy()
        next_obs, reward, terminated, truncated, info = envs.step(action)
        buffer.record(obs, action, reward, terminated, truncated, info, next_obs)
        obs = next_obs
        if step >= FIRST_UPDATE:
            losses = loss(buffer.sample())
            optimizer.zero_grad()
            sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
            optimizer.step()
            target_updater.step()
    mean_return = float(np.mean(envs.return_queue)) if envs.return_queue else float("nan")
    return mean_return, buffer, lambda obs: act(obs, ExplorationType.DETERMINISTIC)


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(__doc__, argv, steps=2_400)
    mean_return, _, _ = train(args.steps, args.seed)
    print(f"the last four episodes return {mean_return:.0f} on average")
    return mean_return


if __name__ == "__main__":
    main()
