"""Data rights: the records of a user in the log, and the user's requests about them."""
