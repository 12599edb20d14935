"""A simulated engine: schedules, caches and publishes like a real one, and computes nothing."""
