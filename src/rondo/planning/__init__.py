"""Pure planners: they compute plans from numbers and never touch a device, a process or the environment."""
