"""The programs: the RL loop, SFT, evaluation. Everything below is wired here, and only the CLI imports this
folder.
"""
