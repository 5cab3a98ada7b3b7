"""The programs, in six rooms on five floors: program; loop; replay and supervised; commands; sessions. Each
imports lower floors only (tests/test_layers.py). Everything else is wired here; inside rondo only the CLI
imports this folder.
"""
