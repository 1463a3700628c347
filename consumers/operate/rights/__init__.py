"""Data rights: a user's records in the log, and the user's requests about them."""
