"""What the command line and Python call: whole runs, evaluation, generation, export, serving."""
