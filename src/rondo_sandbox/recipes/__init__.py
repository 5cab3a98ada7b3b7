"""Recipes with the tool `python`, found by name (`rondo train python_tool`)."""
