"""The parts of a model: attention, experts, the vocabulary, and what is computed from logits."""
