"""The worker process: loads a model, executes step plans, samples."""
