"""An earlier run again: its journal followed, or its recorded rollouts trained on."""
