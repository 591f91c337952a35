"""What several suites share: wrapped engines, child processes, observations of this process."""
