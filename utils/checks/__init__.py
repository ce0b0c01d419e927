"""What the check cells of the labs call: one module per lab, on :mod:`utils.checks.task`."""
