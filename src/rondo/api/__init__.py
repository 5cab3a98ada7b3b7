"""What `import rondo` offers: training, evaluating, generating and serving, without a recipe file.

Every function here writes what it was given as a recipe and runs the command of that name; there is no second
way to train. Data and functions that have no name go into files beside the recipe.
"""

# ruff: noqa: F401
from rondo.api.run import Run, evaluate, generate, load, preference, reward_model, sft, train
from rondo.api.serving import Server, serve
