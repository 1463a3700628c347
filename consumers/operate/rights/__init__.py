"""Data rights: what the log holds of a user, and his demands about it carried out."""
