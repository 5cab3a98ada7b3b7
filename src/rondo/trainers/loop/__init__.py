"""One RL run: prompts in, groups out, steps, publishes, checkpoints, reports."""
