"""Shared by the router, the feedback gateway and the feedback SDK: keys, signed interactions, pseudonyms."""
