"""Empty, for SGLANG_EXTERNAL_MODEL_PACKAGE: where that is set, SGLang does not import all its models at its
start. worker.py registers the one that is wanted.
"""
