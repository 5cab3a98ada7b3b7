"""The native engine: a continuous-batching decoder over Hugging Face causal language models.

engine (asyncio side) → decoder (the decode thread: one token step after another) → scheduler (pure: who sits
where) and a path (generic | lean | compiled: the arithmetic). slots: per-slot numbers. weights: whose storage
the model uses.
"""
