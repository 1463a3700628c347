"""`tidemill replay`: topics of yesterday, run again beside the live ones."""
