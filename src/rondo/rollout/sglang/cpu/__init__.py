"""What SGLang wants to import and a machine without a GPU does not have. `environment` puts this folder on
the PYTHONPATH of the engine's processes; nothing here is imported by rondo itself.
"""
