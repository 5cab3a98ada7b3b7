"""SGLang behind the RolloutEngine protocol. Only `engine` imports SGLang, when an engine is made."""
