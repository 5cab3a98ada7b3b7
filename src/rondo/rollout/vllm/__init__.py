"""vLLM behind the RolloutEngine protocol. Only `engine` imports vLLM, when an engine is made."""
