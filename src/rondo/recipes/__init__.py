"""The recipes that rondo ships, found by name (`rondo train quickstart`), and the task they train on."""
