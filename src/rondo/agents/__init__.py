"""Agent loops and the episode runner: prompts in, scored trajectories out. They see a `generate` callable,
never ray.
"""
