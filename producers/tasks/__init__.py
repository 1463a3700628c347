"""The task feeder: decides which tasks are issued, and when."""
