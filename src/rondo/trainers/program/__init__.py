"""What one trainer step computes: roles, inputs, stages, updates. Nothing here waits for an episode."""
