"""`tidemill dead-letters`: what could not be used, why, and sending it back."""
