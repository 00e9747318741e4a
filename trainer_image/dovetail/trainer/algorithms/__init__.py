"""The arithmetic of SFT, reward modelling and PPO: pure functions over (batch, time) tensors with a mask.

docs/algorithms.md says which convention was chosen wherever published systems differ."""
