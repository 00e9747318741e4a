"""Uses a run's model. It starts vLLM servers, and holds chats in the terminal with local or served models."""
