"""Worlds that a policy acts in, and their recipes; a module is imported when a run names what it has."""
