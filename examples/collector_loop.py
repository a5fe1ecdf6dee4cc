"""Your own TorchRL loop: a transformed Wordle, a language model as policy, a Collector, a ReplayBuffer, a loss."""

import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import RewardSum, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose

from torchrl_lang.data import TrimRows, rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor
from torchrl_lang.objectives import BCLoss
from torchrl_lang.training import adamw, total_loss

torch.manual_seed(0)
base = WordleEnv(["crane", "slate", "purge", "mouse"], batch_size=[64], seed=0)
env = TransformedEnv(base, Compose(StepCounter(), RewardSum()))
control = base.tokenizer.control
lm = causal_lm(vocab_size=35, layers=1, width=32, heads=2, max_length=base.row_length, initializer_range=0.1)
actor = language_actor(lm)
policy = UtteranceActor(actor, control, action_length=6, seed=0)
collector = Collector(
    env, policy, frames_per_batch=64 * 12, total_frames=64 * 36, auto_register_policy_transforms=False
)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32, transform=TrimRows())
loss = BCLoss(actor)
optimizer = adamw(loss, 1e-3)

for batch in collector:
    rows = rows_from_rollout(batch, unfinished="drop")  # the last observation of an episode is its training row
    buffer.extend(rows)
    for _ in range(4):
        optimizer.zero_grad()
        total = total_loss(loss(buffer.sample()))
        total.backward()
        optimizer.step()
    collector.update_policy_weights_()
    print(f"{len(rows)} games, mean return {rows['token_reward'].sum(-1).mean():.2f}, loss {total.item():.3f}")
collector.shutdown()
print(base.tokenizer.decode(rows[0]["tokens"][rows[0]["attention_mask"]]))
