"""verl's recipes and command lines mean something here: keys in its spelling, and its programs' names in the
place of a recipe. Found by its entry point (`rondo.config.load.Spelling`); docs/verl.md is for users.
"""

from rondo_verl.keys import translate
from rondo_verl.programs import argument, program

__all__ = ["argument", "program", "translate"]
