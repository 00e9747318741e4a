"""The arithmetic of SFT, reward modelling, DPO and PPO. These are pure functions over (batch, time) tensors with a
mask.

Published systems differ in some conventions. docs/algorithms.md says which ones are used here."""
