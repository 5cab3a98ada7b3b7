"""The only place where the controller's calls meet an engine: actor, critic, reference and rollout
workers.
"""
