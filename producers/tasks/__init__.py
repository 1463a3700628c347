"""The task feeder: which tasks are issued, and when."""
