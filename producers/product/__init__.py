"""What the router, the feedback gateway and the feedback SDK share: keys, signed interactions, pseudonyms."""
