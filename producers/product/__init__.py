"""What the serving path, the feedback gateway and the feedback SDK share: keys, signed interactions, pseudonyms."""
