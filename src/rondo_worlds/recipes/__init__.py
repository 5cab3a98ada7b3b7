"""Recipes in these worlds, found by name (`rondo train sokoban`), and the demonstrations they begin with."""
