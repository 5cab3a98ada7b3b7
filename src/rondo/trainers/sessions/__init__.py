"""RL algorithms as programs of the user: roles as handles."""
